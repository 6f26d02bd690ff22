// Exp(1) noise with the bits that Tensor.exponential_ of torch draws from the same generator on a CPU, one number after the
// other, and the tokens that torch.multinomial chooses with it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace hf_slospec {
namespace {

constexpr int STATE = at::MERSENNE_STATE_N, MIDDLE = at::MERSENNE_STATE_M;
using Words = std::array<uint32_t, STATE>;

// Replaces the state of a Mersenne Twister (MT19937) by the next one.
void advance(Words& words) {
  const auto twisted = [&](int i, int next) {
    const uint32_t mixed = (words[i] & at::UMASK) | (words[next] & at::LMASK);
    return mixed >> 1 ^ (-(words[next] & 1) & at::MATRIX_A);
  };
  // Words depend on ones that are further away than a vector has elements.
#pragma GCC ivdep
  for (int i = 0; i < STATE - MIDDLE; ++i) words[i] = words[i + MIDDLE] ^ twisted(i, i + 1);
#pragma GCC ivdep
  for (int i = STATE - MIDDLE; i < STATE - 1; ++i) words[i] = words[i + MIDDLE - STATE] ^ twisted(i, i + 1);
  words[STATE - 1] = words[MIDDLE - 1] ^ twisted(STATE - 1, 0);
}

// Draws words as at::mt19937 does: `left_` is one more than the number of words that the state still has.
void draw(at::mt19937_data_pod& engine, uint32_t* to, int64_t count) {
  while (count) {
    if (engine.left_ == 1) {
      advance(engine.state_);
      engine.left_ = STATE + 1, engine.next_ = 0;
    }
    const int64_t n = std::min<int64_t>(count, engine.left_ - 1);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t word = engine.state_[engine.next_ + i];
      word ^= word >> 11;
      word ^= word << 7 & 0x9d2c5680;
      word ^= word << 15 & 0xefc60000;
      to[i] = word ^ word >> 18;
    }
    engine.left_ -= n, engine.next_ += n, to += n, count -= n;
  }
}

// -log(x) of x > 0 with an error of less than one unit in the last place. The polynomial is that of FDLIBM's log.
inline double minus_log(double x) {
  constexpr int64_t ROOT_OF_HALF = 0x3FE6A09E667F3BCD;
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int64_t exponent = (bits - ROOT_OF_HALF) >> 52;
  bits -= exponent << 52;
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof bits);
  const double f = mantissa - 1.0, s = f / (2.0 + f), z = s * s, w = z * z, k = double(exponent);
  const double odd = z * (0x1.5555555555593p-1 + w * (0x1.2492494229359p-2 + w * (0x1.7466496cb03dep-3 + w * 0x1.2f112df3e5244p-3)));
  const double even = w * (0x1.999999997fa04p-2 + w * (0x1.c71c51d8e78afp-3 + w * 0x1.39a09d078c69fp-3));
  const double half = 0.5 * f * f;
  return half - (s * (half + odd + even) + k * 0x1.a39ef35793c76p-33) - f - k * 0x1.62e42feep-1;
}

void exponential_(at::Tensor out, const std::optional<at::Generator>& given) {
  TORCH_CHECK(out.is_contiguous() && out.scalar_type() == at::kFloat, "noise must be contiguous and in float32");
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(given, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> guard(generator->mutex_);
  auto engine = generator->engine().data();
  float* to = out.mutable_data_ptr<float>();
  constexpr int64_t CHUNK = 1024;
  alignas(64) uint32_t words[2 * CHUNK];
  alignas(64) double rests[CHUNK], noise[CHUNK];
  for (int64_t left = out.numel(); left; ) {
    const int64_t n = std::min(CHUNK, left);
    draw(engine, words, 2 * n);
    // 1 - u of uniform numbers u, of 53 bits
    for (int64_t i = 0; i < n; ++i)
      rests[i] = double((int64_t(1) << 53) - (int64_t(words[2 * i] & 0x1FFFFF) << 32 | words[2 * i + 1])) * 0x1p-53;
    for (int64_t i = 0; i < n; ++i) noise[i] = minus_log(rests[i]);
    int64_t num_unclear = 0;  // what is so near to the middle of two floats that torch's last bits decide
    const auto is_unclear = [&](int64_t i) {
      int64_t bits;
      std::memcpy(&bits, &noise[i], sizeof bits);
      return ((bits & 0x1FFFFFFF) - 0xFFFFFF0 & 0x1FFFFFFF) <= 0x20;
    };
    for (int64_t i = 0; i < n; ++i) to[i] = std::fabs(float(noise[i])), num_unclear += is_unclear(i);
    for (int64_t i = 0; num_unclear && i < n; ++i)
      if (is_unclear(i)) to[i] = float(std::fabs(std::log1p(rests[i] - 1.0)));
    left -= n, to += n;
  }
  at::mt19937 drawn;
  drawn.set_data(engine);
  generator->set_engine(drawn);
}

// Returns the first index of the largest probs / noise in each row, [num_rows]; -1 if a probability is not finite. Numbers that
// are not negative are in the order of their bits, and NaN is above all of them.
at::Tensor choose(const at::Tensor& probs, at::TensorList noise) {
  TORCH_CHECK(probs.is_contiguous() && probs.dim() == 2 && probs.size(0) == int64_t(noise.size()), "noise of each row is needed");
  const int64_t num_rows = probs.size(0), size = probs.size(1);
  std::vector<const float*> factors;
  for (const auto& row : noise) {
    TORCH_CHECK(row.is_contiguous() && row.numel() == size, "noise of a row has ", row.sizes(), ", not ", size);
    factors.push_back(row.const_data_ptr<float>());
  }
  auto chosen = at::empty({num_rows}, probs.options().dtype(at::kLong));
  int64_t* to = chosen.mutable_data_ptr<int64_t>();
  const float* rows = probs.const_data_ptr<float>();
  constexpr uint32_t INFINITE = 0x7F800000;
  constexpr int64_t CHUNK = 512;
  at::parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *p = rows + row * size, *q = factors[row];
      uint32_t largest = 0, largest_prob = 0;
      int64_t index = 0;
      for (int64_t first = 0; first < size; first += CHUNK) {
        uint32_t ratios[CHUNK], probs_bits[CHUNK], top = 0;
        const int64_t n = std::min(CHUNK, size - first);
        for (int64_t i = 0; i < n; ++i) {
          const float ratio = p[first + i] / q[first + i];
          std::memcpy(&ratios[i], &ratio, sizeof ratio);
          std::memcpy(&probs_bits[i], &p[first + i], sizeof ratio);
          top = std::max(top, ratios[i]);
          largest_prob = std::max(largest_prob, probs_bits[i]);
        }
        if (first && top <= largest) continue;
        largest = top;
        index = first + (std::find(ratios, ratios + n, top) - ratios);
      }
      to[row] = largest_prob < INFINITE ? index : -1;
    }
  });
  return chosen;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hf_slospec, library) {
  library.def("exponential_(Tensor(a!) out, Generator? generator) -> ()", exponential_);
  library.def("choose(Tensor probs, Tensor[] noise) -> Tensor", choose);
}
}  // namespace hf_slospec
