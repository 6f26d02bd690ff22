// Vectors of floats and their elements in memory, for the sources of this folder.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

namespace hf_slospec {
using at::Tensor;

// A packed weight, its products and rows; see packed.cpp.
struct Packed;
std::shared_ptr<Packed> make_packed(int64_t code, int64_t zero, int64_t outputs, int64_t inputs, int64_t span,
                                    int64_t shared, bool is_invariant, const Tensor& codes,
                                    const std::optional<Tensor>& scales, const std::optional<Tensor>& steps,
                                    const std::optional<Tensor>& minima, const std::optional<Tensor>& min_steps);
Tensor packed_product(const Tensor& x, const std::vector<const Packed*>& weights, const std::optional<Tensor>& bias,
                      bool is_padded = false);
Tensor packed_rows(const Tensor& indices, const Packed& weight);

namespace {

// Vectors of floats, as wide as the CPU's: compilers split wider ones badly.
#ifdef __AVX512F__
constexpr int64_t WIDTH = 16;  // floats per vector
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif
typedef float vec __attribute__((vector_size(WIDTH * sizeof(float))));
typedef int32_t ivec __attribute__((vector_size(WIDTH * sizeof(int32_t))));

inline vec load(const float* from) {
  vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }

typedef uint16_t half_vec __attribute__((vector_size(WIDTH * sizeof(uint16_t))));
typedef uint32_t uvec __attribute__((vector_size(WIDTH * sizeof(uint32_t))));

// Returns WIDTH elements as floats.
inline vec load(const at::BFloat16* from) {
  half_vec halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const uvec bits = (uvec)_mm256_cvtepu16_epi32((__m128i)halves) << 16;  // compilers need three instructions for it
#else
  const uvec bits = __builtin_convertvector(halves, uvec) << 16;
#endif
  vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline vec load(const at::Half* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  vec v;
  for (int64_t i = 0; i < WIDTH; ++i) v[i] = float(from[i]);
  return v;
#endif
}

// Returns the first n elements as floats, and zeros behind them.
template <typename T>
inline vec load_some(const T* from, int64_t n) {
  if (n >= WIDTH) return load(from);
  vec v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = float(from[i]);
  return v;
}

// Elements of a product's factors: one float, or a pair of bf16 numbers where the CPU multiplies such pairs.
typedef uint32_t pair;
#ifdef __AVX512BF16__
constexpr bool HAS_PAIRS = true;
inline vec add_products(vec sum, pair a, vec b) {
  const __m512i factors = _mm512_set1_epi32(int(a));
  return _mm512_dpbf16_ps(sum, (__m512bh)factors, (__m512bh)b);
}
inline void store_rounded(pair* to, vec v) {
  const __m256bh halves = _mm512_cvtneps_pbh(v);
  std::memcpy(to, &halves, sizeof halves);
}
#else
constexpr bool HAS_PAIRS = false;
inline vec add_products(vec, pair, vec) { return vec{}; }
inline void store_rounded(pair*, vec) {}
#endif
inline vec add_products(vec sum, float a, vec b) { return sum + a * b; }
inline vec load(const pair* from) {
  vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

constexpr int64_t BLOCK = 64;  // keys, or elements of values, per block of a product

constexpr int MAX_R = 6;
// Number of vectors of columns for R rows: of 32 registers, 24 hold sums; of 16, 12.
constexpr int columns_of(int R) {
  if (WIDTH == 16) return 4;
  return R == 1 ? 8 : R <= 3 ? 4 : 2;
}

// out[r][0:BLOCK] += sum over i of a[r][i] * b[i][0:BLOCK], for R rows.
template <int R, typename A, typename B>
inline void add_rows(const A* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t n, float* out,
                     int64_t out_stride) {
  constexpr int C = columns_of(R);
  for (int64_t column = 0; column < BLOCK; column += C * WIDTH) {
    vec sums[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * out_stride + column + c * WIDTH);
    for (int64_t i = 0; i < n; ++i) {
      const B* x = b + i * b_stride + column;
      if constexpr (R < C) {  // the loop that leaves fewer vectors beside the sums in registers
        for (int c = 0; c < C; ++c) {
          const vec one = load(x + c * WIDTH);
          for (int r = 0; r < R; ++r) sums[r][c] = add_products(sums[r][c], a[r * a_stride + i], one);
        }
      } else {
        vec all[C];
        for (int c = 0; c < C; ++c) all[c] = load(x + c * WIDTH);
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) sums[r][c] = add_products(sums[r][c], a[r * a_stride + i], all[c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) store(out + r * out_stride + column + c * WIDTH, sums[r][c]);
  }
}

// The same for any number of rows.
template <int R = MAX_R, typename A, typename B>
inline void add_product(int64_t rows, const A* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t n, float* out,
                        int64_t out_stride) {
  for (; rows >= R; rows -= R, a += R * a_stride, out += R * out_stride)
    add_rows<R>(a, a_stride, b, b_stride, n, out, out_stride);
  if constexpr (R > 1)
    if (rows) add_product<R - 1>(rows, a, a_stride, b, b_stride, n, out, out_stride);
}

template <typename T>
using Element = std::conditional_t<HAS_PAIRS && std::is_same_v<T, at::BFloat16>, pair, float>;

// Writes floats in their dtype.
template <typename T>
inline void store_as(T* to, const float* from, int64_t n) {
  if constexpr (std::is_same_v<Element<T>, pair>)
    for (; n >= WIDTH; n -= WIDTH, to += WIDTH, from += WIDTH) store_rounded(reinterpret_cast<pair*>(to), load(from));
  for (int64_t i = 0; i < n; ++i) to[i] = T(from[i]);
}

constexpr int64_t TILE_ROWS = 16, TILE_PAIRS = 16;  // rows of a matrix tile, and pairs of a row

#ifdef HAS_TILES
// Asks Linux once to let this process use matrix tiles; returns whether it does.
inline bool has_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool allowed = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
  return allowed;
}

// Makes what was written visible to the tiles' intrinsics, of which GCC 12 does not know what memory they read.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Sets the sizes of this thread's tiles: 0 to 3 are sums of `rows` by a block's outputs, 4 and 5 are `span` inputs of
// rows, 6 and 7 factors of one block.
inline void configure_tiles(int64_t rows, int64_t span) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 4; ++i) config.bytes_per_row[i] = 64, config.rows[i] = uint8_t(rows);
  for (int i = 4; i < 6; ++i) config.bytes_per_row[i] = uint16_t(span * 2), config.rows[i] = uint8_t(rows);
  for (int i = 6; i < 8; ++i) config.bytes_per_row[i] = 64, config.rows[i] = uint8_t(span / 2);
  finish_stores();
  _tile_loadconfig(&config);
}

// The same as `add_product` for rows and n that are multiples of a tile's; tiles must be configured for whole ones.
inline void add_tiles(int64_t rows, const pair* a, int64_t a_stride, const pair* b, int64_t b_stride, int64_t n, float* out,
                      int64_t out_stride) {
  const int64_t out_bytes = out_stride * sizeof(float), b_bytes = b_stride * sizeof(pair);
  finish_stores();
  for (; rows > 0; rows -= TILE_ROWS, a += TILE_ROWS * a_stride, out += TILE_ROWS * out_stride) {
    _tile_loadd(0, out, out_bytes);
    _tile_loadd(1, out + 16, out_bytes);
    _tile_loadd(2, out + 32, out_bytes);
    _tile_loadd(3, out + 48, out_bytes);
    for (int64_t i = 0; i < n; i += TILE_PAIRS) {
      _tile_loadd(4, a + i, a_stride * sizeof(pair));
      const pair* from = b + i * b_stride;
      _tile_loadd(6, from, b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, from + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, from + 32, b_bytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, from + 48, b_bytes);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, out + 32, out_bytes);
    _tile_stored(3, out + 48, out_bytes);
  }
  finish_stores();
}
#endif

}  // namespace
}  // namespace hf_slospec
