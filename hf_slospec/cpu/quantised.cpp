// Quantised weights of operators.cpp; a source of its own, so that two cores compile both at the same time.

#include "vectors.hpp"

namespace hf_slospec {

#include "quantised.hpp"

std::shared_ptr<Quantised> make_quantised(int64_t code, int64_t zero, int64_t outputs, int64_t span, int64_t shared,
                                          const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& steps,
                                          const std::optional<Tensor>& minima, const std::optional<Tensor>& min_steps) {
  TORCH_CHECK(span == GROUP || (code == SIX && span == GROUP / 2), "no products with ", span, " inputs per scale");
  const auto or_none = [](const std::optional<Tensor>& tensor) { return tensor.value_or(Tensor()); };
  return std::make_shared<Quantised>(Quantised{code, zero, outputs, span, shared, codes, scales, or_none(steps),
                                               or_none(minima), or_none(min_steps)});
}

}  // namespace hf_slospec
