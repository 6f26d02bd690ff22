// Packed weights of operators.cpp; a source of its own, so that two cores compile both at the same time.

#include "vectors.hpp"

namespace hf_slospec {

#include "packed.hpp"

std::shared_ptr<Packed> make_packed(int64_t code, int64_t zero, int64_t outputs, int64_t inputs, int64_t span,
                                    int64_t shared, bool is_invariant, const Tensor& codes,
                                    const std::optional<Tensor>& scales, const std::optional<Tensor>& steps,
                                    const std::optional<Tensor>& minima, const std::optional<Tensor>& min_steps) {
  TORCH_CHECK(is_dense(code) || span == GROUP || (code == SIX && span == GROUP / 2), "no products with ", span,
              " inputs per scale");
  const auto or_none = [](const std::optional<Tensor>& tensor) { return tensor.value_or(Tensor()); };
  return std::make_shared<Packed>(Packed{code, zero, outputs, inputs, span, shared, is_invariant, codes, or_none(scales),
                                         or_none(steps), or_none(minima), or_none(min_steps)});
}

}  // namespace hf_slospec
