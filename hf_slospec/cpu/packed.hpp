// Products with packed weights, in blocks of LANES outputs that are read in sequence: dense ones in bf16, fp16 or fp32, and
// quantised ones, of codes of 4, 5, 6 or 8 bits and scales of 16 or 32 inputs each.
//
// A quantised weight is code * scale - minimum. Codes are decoded in registers, once for several rows, and multiplied as they are:
// in pairs of bf16 where the CPU has such products and they are faster, else in fp32. Sums of one span of inputs are
// multiplied by its scale in fp32, so that nothing but the input is rounded. For many rows, weights are dequantised in the
// input's dtype.
#pragma once

// Numbers of inputs whose codes are stored together, and of outputs per block.
constexpr int64_t GROUP = 32, LANES = 16;
#ifdef HAS_TILES
constexpr int64_t TILE_BLOCKS = 4;
#endif
// Functions that take the compiler long, and the caller nothing: not compiled again for each place that calls them.
#define COMPILED_ONCE __attribute__((noinline))
constexpr int64_t VECTORS = LANES / WIDTH;  // per block of outputs

// Bits of a code. Groups of 4-bit codes are 4 times 16 dwords, one per output: word h, nibble p of dword vector c has
// input 8 * c + 2 * p + h. Behind them are 16 dwords of fifth bits, at bit 4 * c + p of word h, or 32 dwords of fifth
// and sixth bits, at bit 2 * (4 * (c % 2) + p) of dword vector c / 2. 8-bit codes are [16 pairs][2][16 outputs]. FLOAT8 is
// float8_e4m3fn, of which `scales` hold 256 times the scale. Weights in the other codes are dense: their blocks are
// [inputs][LANES], in bf16 [inputs / 2][LANES][2].
enum Code { FOUR = 4, FIVE = 5, SIX = 6, EIGHT = 8, FLOAT8 = 9, BF16 = 16, FP16 = 17, FP32 = 32 };
constexpr int64_t bytes_of(int code) { return LANES * GROUP * std::min(code, 8) / 8; }  // of a group of a quantised weight
constexpr bool is_dense(int code) { return code >= BF16; }

struct Packed {
  int64_t code;       // a Code
  int64_t zero;       // code of the value 0; codes of 8 bits are signed
  int64_t outputs;
  int64_t inputs;
  int64_t span;       // inputs per scale: 32, or 16 of codes of 6 bits; of a dense weight: per partial sum
  int64_t shared;     // spans per factor of `scales`, with which each `steps` entry is multiplied
  bool is_invariant;  // the bits of a row's products do not depend on the number of rows; of dense weights only
  Tensor codes;       // [num_blocks, num_groups, bytes] uint8, or [num_blocks, inputs, LANES] of a dense weight
  Tensor scales;      // [num_blocks, num_spans / shared, LANES] fp32 or fp16
  Tensor steps;       // [num_blocks, num_spans, LANES] int8; undefined: all are 1
  Tensor minima;      // as `scales`; undefined: all are 0
  Tensor min_steps;   // as `steps`
};

// Returns WIDTH bytes as floats.
inline vec load(const int8_t* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  vec v;
  for (int64_t i = 0; i < WIDTH; ++i) v[i] = float(from[i]);
  return v;
#endif
}

// Returns WIDTH numbers in float8_e4m3fn, divided by 256, which fp16 with the same bits holds; that has subnormals of all CPUs.
inline vec load_float8(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000)));
  const __m256i rest = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3F80));
  return (vec)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
#else
  alignas(64) at::Half halves[WIDTH];
  for (int64_t i = 0; i < WIDTH; ++i)
    halves[i] = at::Half(uint16_t((from[i] & 0x80) << 8 | (from[i] & 0x7F) << 7), at::Half::from_bits());
  return load(halves);
#endif
}

// Returns WIDTH codes of 8 bits.
template <int C>
inline vec load_code(const uint8_t* from) {
  if constexpr (C == FLOAT8) return load_float8(from);
  return load(reinterpret_cast<const int8_t*>(from));
}

// Scales or minima of a weight, one per lane and span.
struct Factors {
  const at::Half* halves;
  const float* floats;  // null: `halves` has them
  const int8_t* steps;  // null: all are 1
  int64_t num_spans, shared;

  Factors(const Tensor& values, const Tensor& steps, int64_t num_spans, int64_t shared)
      : halves(nullptr), floats(nullptr), steps(nullptr), num_spans(num_spans), shared(shared) {
    if (!values.defined()) return;
    if (values.scalar_type() == at::kHalf)
      halves = values.const_data_ptr<at::Half>();
    else
      floats = values.const_data_ptr<float>();
    if (steps.defined()) this->steps = steps.const_data_ptr<int8_t>();
  }
  explicit operator bool() const { return halves || floats; }

  vec at(int64_t block, int64_t span, int64_t v) const {
    const int64_t index = (block * (num_spans / shared) + span / shared) * LANES + v * WIDTH;
    const vec value = floats ? load(floats + index) : load(halves + index);
    return steps ? value * load(steps + (block * num_spans + span) * LANES + v * WIDTH) : value;
  }
};

// The code of the value 0 and, where vectors can be looked up in, the values of 4-bit codes.
struct Zero {
  int32_t code;
#ifdef __AVX512F__
  __m512 values;
  explicit Zero(int64_t zero)
      : code(int32_t(zero)),
        values(_mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(zero))) {}
#else
  explicit Zero(int64_t zero) : code(int32_t(zero)) {}
#endif
};

// Returns the codes of one input of a group, less that of 0, for WIDTH outputs from `lane` on.
template <int C>
inline vec decoded(const uint8_t* group, int64_t input, int64_t lane, const Zero& zero) {
  if constexpr (C >= EIGHT) {
    return load_code<C>(group + input * LANES + lane);
  } else {
    const int64_t c = input / 8, p = input % 8 / 2, h = input % 2;
    const auto vector = [&](int64_t index) {
      ivec v;
      std::memcpy(&v, group + (index * LANES + lane) * 4, sizeof v);
      return v;
    };
    const ivec nibbles = vector(c) >> int(16 * h + 4 * p);
#ifdef __AVX512F__
    if constexpr (C == FOUR) return (vec)_mm512_permutexvar_ps((__m512i)nibbles, zero.values);  // by the lowest four bits
#endif
    ivec code = nibbles & 15;
    if constexpr (C == FIVE) code |= (vector(4) >> int(16 * h + 4 * c + p) & 1) << 4;
    if constexpr (C == SIX) code |= (vector(4 + c / 2) >> int(16 * h + 2 * (4 * (c % 2) + p)) & 3) << 4;
    return __builtin_convertvector(code - zero.code, vec);
  }
}

#ifdef __AVX512BF16__
// Values of codes as bf16, for lookups by code.
struct Table {
  __m512i low, high;
  explicit Table(int64_t zero) {
    alignas(64) uint16_t values[64];
    for (int64_t i = 0; i < 64; ++i) values[i] = at::BFloat16(float(i - zero)).x;
    low = _mm512_load_si512(values), high = _mm512_load_si512(values + 32);
  }
};

// Returns the codes of a pair of inputs, less `zero`, as bf16 for all 16 outputs.
template <int C>
inline __m512i decoded_pair(const uint8_t* group, int64_t index, const Table& table, const __m512i& low_table) {
  const auto* vectors = reinterpret_cast<const __m512i*>(group);
  if constexpr (C >= EIGHT) {
    const auto as_float = [&](int64_t i) { return (__m512i)load_code<C>(group + i * LANES); };
    // bf16 is the upper half of a float, which holds 8 bits exactly.
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(as_float(2 * index), 16), as_float(2 * index + 1));
  } else {
    const int c = int(index) / 4, p = int(index) % 4;
    const __m512i nibbles = _mm512_srli_epi32(_mm512_loadu_si512(vectors + c), 4 * p);
    if constexpr (C == FOUR) return _mm512_permutexvar_epi16(nibbles, low_table);
    const __m512i low = _mm512_and_si512(nibbles, _mm512_set1_epi32(0x000F000F));
    if constexpr (C == FIVE) {
      const __m512i bits = _mm512_srli_epi32(_mm512_loadu_si512(vectors + 4), 4 * c + p);
      const __m512i code = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x00010001)), 4));
      return _mm512_permutexvar_epi16(code, table.low);
    }
    const __m512i bits = _mm512_srli_epi32(_mm512_loadu_si512(vectors + 4 + c / 2), 2 * (4 * (c % 2) + p));
    const __m512i code = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x00030003)), 4));
    return _mm512_permutex2var_epi16(table.low, code, table.high);
  }
}

// The 4-bit values twice, as lookups by word ignore all but five bits.
inline __m512i low_table(const Table& table) {
  return _mm512_inserti64x4(table.low, _mm512_castsi512_si256(table.low), 1);
}
#endif

// out[r][0:LANES] = products of R rows of E with one block.
template <int C, int R, typename E>
COMPILED_ONCE void block_rows(const Packed& weight, const E* x, int64_t x_stride, const float* input_sums,
                              int64_t sum_stride, int64_t block, float* out) {
  constexpr bool IS_PAIR = std::is_same_v<E, pair>;
  constexpr int PARTS = R == 1 ? (IS_PAIR ? 4 : 3) : R <= (IS_PAIR ? 3 : 2) ? 2 : 1;  // sums that do not wait for each other
  const int64_t num_groups = weight.codes.size(1), num_spans = weight.inputs / weight.span;
  const uint8_t* group = weight.codes.const_data_ptr<uint8_t>() + block * num_groups * bytes_of(C);
  const int64_t per_span = weight.span / (IS_PAIR ? 2 : 1);
  const Factors scales(weight.scales, weight.steps, num_spans, weight.shared);
  const Factors minima(weight.minima, weight.min_steps, num_spans, weight.shared);
  const Zero zero(weight.zero);
#ifdef __AVX512BF16__
  const Table table(weight.zero);
  const __m512i nibbles = low_table(table);
#endif
  constexpr int64_t AHEAD = 8192;  // bytes from what is read to what is prefetched
  vec totals[R][VECTORS] = {};
  for (int64_t span = 0; span < num_spans; ++span) {
    vec sums[R][VECTORS][PARTS] = {};
    const int64_t in_group = span * weight.span % GROUP;
    const E* from = x + span * per_span;
    for (int64_t line = 0; line < bytes_of(C) && !in_group; line += 64) __builtin_prefetch(group + AHEAD + line);
    const auto add = [&](int64_t first, auto count) {
#pragma GCC unroll 32
      for (int64_t i = 0; i < count.value; ++i) {
        if constexpr (IS_PAIR) {
#ifdef __AVX512BF16__
          const vec factor = (vec)decoded_pair<C>(group, first + i, table, nibbles);
          for (int r = 0; r < R; ++r)
            sums[r][0][i % PARTS] = add_products(sums[r][0][i % PARTS], from[r * x_stride + i], factor);
#endif
        } else {
          for (int64_t v = 0; v < VECTORS; ++v) {
            const vec factor = decoded<C>(group, first + i, v * WIDTH, zero);
            for (int r = 0; r < R; ++r) sums[r][v][i % PARTS] += from[r * x_stride + i] * factor;
          }
        }
      }
    };
    constexpr int SIZE = IS_PAIR ? 2 : 1;
    if (C != SIX || weight.span == GROUP)
      add(0, std::integral_constant<int, GROUP / SIZE>());
    else if constexpr (C == SIX)
      in_group ? add(GROUP / 2 / SIZE, std::integral_constant<int, GROUP / 2 / SIZE>())
               : add(0, std::integral_constant<int, GROUP / 2 / SIZE>());
    for (int64_t v = 0; v < VECTORS; ++v) {
      const vec scale = scales.at(block, span, v);
      for (int r = 0; r < R; ++r) {
        vec sum = sums[r][v][0];
        for (int part = 1; part < PARTS; ++part) sum += sums[r][v][part];
        totals[r][v] += scale * sum;
      }
      if (!minima) continue;
      const vec minimum = minima.at(block, span, v);
      for (int r = 0; r < R; ++r) totals[r][v] -= minimum * input_sums[r * sum_stride + span];
    }
    if (in_group + weight.span == GROUP) group += bytes_of(C);
  }
  for (int r = 0; r < R; ++r)
    for (int64_t v = 0; v < VECTORS; ++v) store(out + r * LANES + v * WIDTH, totals[r][v]);
}

// Where matrix tiles serve more than FEW_ROWS rows, fewer are multiplied as floats: vectors of such CPUs multiply pairs at
// half the speed. Fewer numbers of rows then have a kernel of their own, as each takes the compiler half a second.
#ifdef HAS_TILES
constexpr int64_t FEW_ROWS = 2;
constexpr bool HAS_FEW_SIZES = true;
constexpr int MAX_PACKED_ROWS = 4;
template <typename T>
using FewElement = float;
#else
constexpr bool HAS_FEW_SIZES = false;
constexpr int MAX_PACKED_ROWS = WIDTH == 16 ? 8 : 4;
template <typename T>
using FewElement = Element<T>;
#endif

// The same for any number of rows.
template <int C, int R = MAX_PACKED_ROWS, typename E>
inline void block_products(const Packed& weight, int64_t rows, const E* x, int64_t x_stride, const float* input_sums,
                           int64_t sum_stride, int64_t block, float* out) {
  for (; rows >= R; rows -= R, x += R * x_stride, out += R * LANES, input_sums += R * sum_stride)
    block_rows<C, R>(weight, x, x_stride, input_sums, sum_stride, block, out);
  if constexpr (R > 1)
    if (rows) block_products<C, HAS_FEW_SIZES ? R / 2 : R - 1>(weight, rows, x, x_stride, input_sums, sum_stride, block, out);
}

// Returns the products' factors that one element of a dense weight in memory holds, for WIDTH outputs.
inline std::array<vec, 1> factors_at(const float* from, float) { return {load(from)}; }
inline std::array<vec, 1> factors_at(const at::Half* from, float) { return {load(from)}; }
inline std::array<vec, 1> factors_at(const pair* from, pair) { return {load(from)}; }
inline std::array<vec, 2> factors_at(const pair* from, float) {
  uvec bits;
  std::memcpy(&bits, from, sizeof bits);
  return {(vec)(bits << 16), (vec)(bits & 0xFFFF0000)};  // bf16 is the upper half of a float
}

// Elements of x that are multiplied with one element of a dense weight in memory.
template <typename E, typename W>
constexpr int64_t PER_ELEMENT = std::is_same_v<W, pair> && std::is_same_v<E, float> ? 2 : 1;

// out[b][r][0:LANES] = products of R rows with B blocks of a dense weight, [n][LANES] each. A row's sums do not depend on
// the number of rows. Every `span` elements of the weight are summed by themselves and then added.
template <int R, int B, typename E, typename W>
COMPILED_ONCE void dense_rows(const E* x, int64_t x_stride, const W* blocks, int64_t n, int64_t span, float* out) {
  constexpr int64_t AHEAD = 8192 / B / sizeof(W);  // elements from what is read to what is prefetched
  constexpr int64_t PARTS = PER_ELEMENT<E, W>;
  vec totals[B][R][VECTORS] = {};
  for (int64_t begin = 0; begin < n; begin += span) {
    vec sums[B][R][VECTORS] = {};
    const int64_t end = std::min(begin + span, n);
#pragma GCC unroll 4
    for (int64_t i = begin; i < end; ++i)
      for (int b = 0; b < B; ++b) {
        const W* from = blocks + (b * n + i) * LANES;
        __builtin_prefetch(from + AHEAD);
        std::array<vec, PARTS> factors[VECTORS];
        for (int64_t v = 0; v < VECTORS; ++v) factors[v] = factors_at(from + v * WIDTH, E());
        for (int64_t part = 0; part < PARTS; ++part)
          for (int r = 0; r < R; ++r)
            for (int64_t v = 0; v < VECTORS; ++v)
              sums[b][r][v] = add_products(sums[b][r][v], x[r * x_stride + i * PARTS + part], factors[v][part]);
      }
    for (int b = 0; b < B; ++b)
      for (int r = 0; r < R; ++r)
        for (int64_t v = 0; v < VECTORS; ++v) totals[b][r][v] += sums[b][r][v];
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r)
      for (int64_t v = 0; v < VECTORS; ++v) store(out + (b * R + r) * LANES + v * WIDTH, totals[b][r][v]);
}

// Number of rows that are multiplied with a dense weight in one pass: of 32 registers, 24 hold sums; of 16, 12.
constexpr int64_t DENSE_ROWS = VECTORS == 1 ? 12 : 6;

// Elements of a dense weight in memory.
template <int C>
using Stored = std::conditional_t<C == FP32, float, std::conditional_t<C == FP16, at::Half, pair>>;

// to[0:inputs][0:LANES] = the weights of a block, rounded to E.
template <int C, typename E>
COMPILED_ONCE void dequantise(const Packed& weight, int64_t block, E* to) {
  if constexpr (is_dense(C)) {
    using W = Stored<C>;
    constexpr int64_t PARTS = PER_ELEMENT<E, W>;
    const W* from = static_cast<const W*>(weight.codes.const_data_ptr()) + block * weight.inputs / PARTS * LANES;
    for (int64_t i = 0; i < weight.inputs / PARTS; ++i)
      for (int64_t v = 0; v < VECTORS; ++v) {
        const auto factors = factors_at(from + i * LANES + v * WIDTH, E());
        for (int64_t part = 0; part < PARTS; ++part) store(to + (i * PARTS + part) * LANES + v * WIDTH, factors[part]);
      }
    return;
  }
  const int64_t num_groups = weight.codes.size(1), inputs = weight.inputs, num_spans = inputs / weight.span;
  const uint8_t* codes = weight.codes.const_data_ptr<uint8_t>() + block * num_groups * bytes_of(C);
  const Factors scales(weight.scales, weight.steps, num_spans, weight.shared);
  const Factors minima(weight.minima, weight.min_steps, num_spans, weight.shared);
  const auto factor = [&](const Factors& factors, int64_t input, int64_t v) {
    return factors ? factors.at(block, input / weight.span, v) : vec{};
  };
  if constexpr (std::is_same_v<E, pair>) {
#ifdef __AVX512BF16__
    const Table table(weight.zero);
    const __m512i nibbles = low_table(table);
    alignas(64) static constexpr auto order = [] {
      std::array<uint16_t, 32> of_pairs{};
      for (int i = 0; i < 32; ++i) of_pairs[i] = uint16_t(i / 2 + i % 2 * 16);
      return of_pairs;
    }();
    const __m512i in_pairs = _mm512_load_si512(order.data());
    vec scale = {}, minimum = {};
    for (int64_t input = 0; input < inputs; input += 2, to += LANES) {
      if (input % weight.span == 0) scale = factor(scales, input, 0), minimum = factor(minima, input, 0);
      const __m512i code = decoded_pair<C>(codes + input / GROUP * bytes_of(C), input % GROUP / 2, table, nibbles);
      const vec even = (vec)_mm512_slli_epi32(code, 16) * scale - minimum;
      const vec odd = (vec)_mm512_and_si512(code, _mm512_set1_epi32(int(0xFFFF0000))) * scale - minimum;
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(in_pairs, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
    }
#endif
  } else {
    const Zero zero(weight.zero);
    for (int64_t input = 0; input < inputs; ++input, to += LANES)
      for (int64_t v = 0; v < VECTORS; ++v) {
        const vec code = decoded<C>(codes + input / GROUP * bytes_of(C), input % GROUP, v * WIDTH, zero);
        store(to + v * WIDTH, code * factor(scales, input, v) - factor(minima, input, v));
      }
  }
}

#ifdef HAS_TILES
// out[block][r][0:LANES] = products of the tiles' rows with up to TILE_BLOCKS blocks from `block` on.
template <int C>
void tile_products(const Packed& weight, int64_t rows, const pair* x, int64_t x_stride, const float* input_sums,
                   int64_t sum_stride, int64_t block, int64_t blocks, float* out) {
  const int64_t num_groups = weight.codes.size(1), num_spans = weight.inputs / weight.span;
  const int64_t num_pairs = weight.span / 2;
  const uint8_t* codes = weight.codes.const_data_ptr<uint8_t>() + block * num_groups * bytes_of(C);
  const Table table(weight.zero);
  const __m512i nibbles = low_table(table);
  const Factors scales(weight.scales, weight.steps, num_spans, weight.shared);
  const Factors minima(weight.minima, weight.min_steps, num_spans, weight.shared);
  alignas(64) pair decoded[TILE_BLOCKS][GROUP / 2][LANES];
  alignas(64) float sums[TILE_BLOCKS][TILE_ROWS][LANES];
  std::fill(out, out + blocks * TILE_ROWS * LANES, 0.0f);
  for (int64_t span = 0; span < num_spans; ++span) {
    const int64_t group = span * weight.span / GROUP;
    _tile_loadd(4, x + span * num_pairs, x_stride * sizeof(pair));
    const auto decode = [&](int64_t b, auto first, auto count) {
      const uint8_t* from = codes + (b * num_groups + group) * bytes_of(C);
      for (int64_t line = 0; line < bytes_of(C); line += 64) __builtin_prefetch(from + 4 * bytes_of(C) + line);
#pragma GCC unroll 16
      for (int64_t i = 0; i < count.value; ++i)
        _mm512_store_si512(decoded[b][i], decoded_pair<C>(from, first.value + i, table, nibbles));
    };
    for (int64_t b = 0; b < blocks; ++b) {
      using Whole = std::integral_constant<int, GROUP / 2>;
      using Half = std::integral_constant<int, GROUP / 4>;
      using Zero = std::integral_constant<int, 0>;
      if (C != SIX || weight.span == GROUP)
        decode(b, Zero(), Whole());
      else if constexpr (C == SIX)
        span % 2 ? decode(b, Half(), Half()) : decode(b, Zero(), Half());
    }
    finish_stores();
    // Tiles have numbers that are known when this is compiled.
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(6, decoded[0], 64);
    _tile_dpbf16ps(0, 4, 6);
    if (blocks > 1) {
      _tile_loadd(7, decoded[1], 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (blocks > 2) {
      _tile_loadd(6, decoded[2], 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (blocks > 3) {
      _tile_loadd(7, decoded[3], 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums[0], 64);
    if (blocks > 1) _tile_stored(1, sums[1], 64);
    if (blocks > 2) _tile_stored(2, sums[2], 64);
    if (blocks > 3) _tile_stored(3, sums[3], 64);
    for (int64_t b = 0; b < blocks; ++b) {
      const vec scale = scales.at(block + b, span, 0);
      float* to = out + b * TILE_ROWS * LANES;
      for (int64_t r = 0; r < rows; ++r)
        store(to + r * LANES, load(to + r * LANES) + scale * load(sums[b][r]));
      if (!minima) continue;
      const vec minimum = minima.at(block + b, span, 0);
      for (int64_t r = 0; r < rows; ++r)
        store(to + r * LANES, load(to + r * LANES) - minimum * input_sums[r * sum_stride + span]);
    }
  }
}

#endif

// Rows in T, and where their products with a weight go.
template <typename T>
struct Rows {
  const Element<T>* x;      // [num_rows, width]
  int64_t num_rows, width;  // elements of x
  const float* sums;        // [num_rows, num_spans] of the inputs, if the weight has minima
  int64_t num_spans;
  const T* bias;  // null: none
  T* out;         // [num_rows, out_stride]
  int64_t out_stride, outputs;

  void write(int64_t row, int64_t block, const float* products) const {
    const int64_t first = block * LANES, n = std::min(LANES, outputs - first);
    alignas(64) float sums[LANES];
    for (int64_t j = 0; bias && j < n; ++j) sums[j] = products[j] + float(bias[first + j]);
    store_as(out + row * out_stride + first, bias ? sums : products, n);
  }
};

#ifdef HAS_TILES
// Multiplies rows with dense blocks of bf16 pairs; tiles must be configured for up to TILE_ROWS rows and GROUP inputs.
inline void multiply_tiles(const pair* weights, const Rows<at::BFloat16>& rows, int64_t first, int64_t num_blocks) {
  constexpr int64_t STEP = GROUP / 2, X_TILE = 64;
  const int64_t x_stride = rows.width * sizeof(pair);
  alignas(64) float sums[TILE_BLOCKS][TILE_ROWS][LANES];
  const auto block_at = [&](int64_t b) { return weights + std::min(b, num_blocks - 1) * rows.width * LANES; };
  const auto write = [&](const float (&from)[TILE_ROWS][LANES], int64_t row, int64_t b) {
    for (int64_t r = 0; b < num_blocks && r < std::min(TILE_ROWS, rows.num_rows); ++r) rows.write(row + r, first + b, from[r]);
  };
  if (rows.num_rows < 2 * TILE_ROWS) {
    const int64_t size = std::min(TILE_ROWS, rows.num_rows);
    for (int64_t b = 0; b < num_blocks; b += TILE_BLOCKS)
      for (int64_t next_row = 0; next_row < rows.num_rows; next_row += size) {
        const int64_t row = std::min(next_row, rows.num_rows - size);  // some rows are computed twice, alike
        const pair *x = rows.x + row * rows.width, *w0 = block_at(b), *w1 = block_at(b + 1), *w2 = block_at(b + 2),
                   *w3 = block_at(b + 3);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < rows.width; i += STEP) {
          _tile_loadd(4, x + i, x_stride);
          _tile_loadd(6, w0 + i * LANES, X_TILE);
          _tile_loadd(7, w1 + i * LANES, X_TILE);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(6, w2 + i * LANES, X_TILE);
          _tile_loadd(7, w3 + i * LANES, X_TILE);
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, sums[0], X_TILE);
        _tile_stored(1, sums[1], X_TILE);
        _tile_stored(2, sums[2], X_TILE);
        _tile_stored(3, sums[3], X_TILE);
        finish_stores();
        for (int64_t i = 0; i < TILE_BLOCKS; ++i) write(sums[i], row, b + i);
      }
    return;
  }
  for (int64_t next_row = 0; next_row < rows.num_rows; next_row += 2 * TILE_ROWS) {
    const int64_t row = std::min(next_row, rows.num_rows - 2 * TILE_ROWS);
    const pair *x = rows.x + row * rows.width, *y = x + TILE_ROWS * rows.width;
    for (int64_t b = 0; b < num_blocks; b += 2) {
      const pair *w0 = block_at(b), *w1 = block_at(b + 1);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < rows.width; i += STEP) {
        _tile_loadd(4, x + i, x_stride);
        _tile_loadd(5, y + i, x_stride);
        _tile_loadd(6, w0 + i * LANES, X_TILE);
        _tile_loadd(7, w1 + i * LANES, X_TILE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums[0], X_TILE);
      _tile_stored(1, sums[1], X_TILE);
      _tile_stored(2, sums[2], X_TILE);
      _tile_stored(3, sums[3], X_TILE);
      finish_stores();
      for (int64_t i = 0; i < 4; ++i) write(sums[i], row + i / 2 * TILE_ROWS, b + i % 2);
    }
  }
}
#endif

// Multiplies `num_rows` rows, at most R, with some dense blocks.
template <int R = DENSE_ROWS, typename W, typename T>
void multiply_few(const W* blocks, int64_t span, const Rows<T>& rows, int64_t row, int64_t num_rows, int64_t first,
                  int64_t num_blocks) {
  if constexpr (R > 1)
    if (num_rows < R) return multiply_few<R - 1>(blocks, span, rows, row, num_rows, first, num_blocks);
  constexpr int64_t B = R == 1 ? 4 : R == 2 || VECTORS == 1 ? 2 : 1;  // sums that do not wait for each other
  const int64_t n = rows.width / PER_ELEMENT<Element<T>, W>;
  float sums[B * R * LANES];
  const auto multiply = [&](int64_t block, auto count) {
    dense_rows<R, count.value>(rows.x + row * rows.width, rows.width, blocks + block * n * LANES, n, span, sums);
    for (int64_t b = 0; b < count.value; ++b)
      for (int64_t r = 0; r < R; ++r) rows.write(row + r, first + block + b, &sums[(b * R + r) * LANES]);
  };
  int64_t b = 0;
  for (; b + B <= num_blocks; b += B) multiply(b, std::integral_constant<int, B>());
  for (; b < num_blocks; ++b) multiply(b, std::integral_constant<int, 1>());
}

// Multiplies rows with dense blocks in W, [num_blocks, rows.width, LANES], of which the first writes output first * LANES.
template <typename W, typename T>
void multiply_dense(const W* weights, int64_t span, bool is_invariant, const Rows<T>& rows, int64_t first,
                    int64_t num_blocks) {
  const int64_t n = rows.width / PER_ELEMENT<Element<T>, W>;
#ifdef HAS_TILES
  if constexpr (std::is_same_v<W, pair> && std::is_same_v<T, at::BFloat16>)
    if (!is_invariant && rows.num_rows > 1 && n % (GROUP / 2) == 0 && has_tiles()) {
      configure_tiles(std::min(TILE_ROWS, rows.num_rows), GROUP);
      constexpr int64_t TOGETHER = 4;  // blocks that all rows use while they are in the cache
      for (int64_t b = 0; b < num_blocks; b += TOGETHER)
        multiply_tiles(weights + b * n * LANES, rows, first + b, std::min(TOGETHER, num_blocks - b));
      return _tile_release();
    }
#endif
  // The first pass waits for memory, so it has as many rows as possible; the others read the same blocks from a cache.
  const int64_t first_rows = std::min(DENSE_ROWS, rows.num_rows), others = rows.num_rows - first_rows;
  const int64_t num_others = (others + DENSE_ROWS - 1) / DENSE_ROWS, together = others ? 4 : num_blocks;
  for (int64_t b = 0; b < num_blocks; b += together) {
    const auto multiply = [&](int64_t begin, int64_t end) {
      multiply_few(weights + b * n * LANES, span, rows, begin, end - begin, first + b, std::min(together, num_blocks - b));
    };
    multiply(0, first_rows);
    for (int64_t i = 0; i < num_others; ++i)
      multiply(first_rows + others * i / num_others, first_rows + others * (i + 1) / num_others);
  }
}

// Number of rows from which on weights are converted to the dtype of the product once for all rows, rounded to the dtype of
// the input; of dense ones where that takes instructions.
constexpr int64_t MANY_ROWS = 64;

// Multiplies rows with blocks of a weight.
template <int C, typename T>
void multiply_range(const Packed& weight, const Rows<T>& rows, int64_t begin, int64_t end) {
  using E = Element<T>;
  const auto convert = [&](auto weight_code) {
    constexpr int64_t TOGETHER = 4;
    std::vector<E> factors(TOGETHER * rows.width * LANES);
    for (int64_t block = begin; block < end; block += TOGETHER) {
      const int64_t blocks = std::min(TOGETHER, end - block);
      for (int64_t b = 0; b < blocks; ++b) dequantise<weight_code.value>(weight, block + b, &factors[b * rows.width * LANES]);
      multiply_dense(factors.data(), rows.width, weight.is_invariant, rows, block, blocks);
    }
  };
  if constexpr (is_dense(C)) {
    using W = Stored<C>;
    if constexpr (!std::is_same_v<W, E>)
      if (rows.num_rows >= MANY_ROWS && weight.span == weight.inputs)
        return convert(std::integral_constant<int, C>());
    const int64_t n = rows.width / PER_ELEMENT<E, W>, size = std::is_same_v<W, pair> ? 2 : 1;
    const W* weights = static_cast<const W*>(weight.codes.const_data_ptr()) + begin * n * LANES;
    return multiply_dense(weights, (weight.span + size - 1) / size, weight.is_invariant, rows, begin, end - begin);
  } else {
    if (rows.num_rows >= MANY_ROWS) return convert(std::integral_constant<int, C>());
#ifdef HAS_TILES
    if constexpr (std::is_same_v<E, pair>)
      if (rows.num_rows > FEW_ROWS && has_tiles()) {
        alignas(64) float sums[TILE_BLOCKS][TILE_ROWS][LANES];
        for (int64_t row = 0; row < rows.num_rows; row += TILE_ROWS) {
          const int64_t num_rows = std::min(TILE_ROWS, rows.num_rows - row);
          configure_tiles(num_rows, weight.span);
          for (int64_t block = begin; block < end; block += TILE_BLOCKS) {
            const int64_t blocks = std::min(TILE_BLOCKS, end - block);
            tile_products<C>(weight, num_rows, rows.x + row * rows.width, rows.width, rows.sums + row * rows.num_spans,
                             rows.num_spans, block, blocks, &sums[0][0][0]);
            for (int64_t b = 0; b < blocks; ++b)
              for (int64_t r = 0; r < num_rows; ++r) rows.write(row + r, block + b, sums[b][r]);
          }
        }
        return _tile_release();
      }
#endif
    using F = FewElement<T>;
    std::vector<F> converted;
    const F* x = reinterpret_cast<const F*>(rows.x);
    if constexpr (!std::is_same_v<F, E>) {
      converted.resize(rows.num_rows * weight.inputs);
      const auto* halves = reinterpret_cast<const at::BFloat16*>(rows.x);
      for (size_t i = 0; i < converted.size(); i += WIDTH) store(&converted[i], load(halves + i));
      x = converted.data();
    }
    const int64_t x_stride = std::is_same_v<F, pair> ? rows.width : weight.inputs;
    float sums[MAX_PACKED_ROWS * LANES];
    for (int64_t block = begin; block < end; ++block)
      for (int64_t row = 0; row < rows.num_rows; row += MAX_PACKED_ROWS) {
        const int64_t num_rows = std::min<int64_t>(MAX_PACKED_ROWS, rows.num_rows - row);
        block_products<C>(weight, num_rows, x + row * x_stride, x_stride, rows.sums + row * rows.num_spans,
                          rows.num_spans, block, sums);
        for (int64_t r = 0; r < num_rows; ++r) rows.write(row + r, block, &sums[r * LANES]);
      }
  }
}

// Calls a function with the code of a quantised weight.
template <typename F>
void with_code(int64_t code, F function) {
  switch (code) {
    case FOUR: return function(std::integral_constant<int, FOUR>());
    case FIVE: return function(std::integral_constant<int, FIVE>());
    case SIX: return function(std::integral_constant<int, SIX>());
    case EIGHT: return function(std::integral_constant<int, EIGHT>());
    case FLOAT8: return function(std::integral_constant<int, FLOAT8>());
    default: TORCH_CHECK(false, "no codes of kind ", code);
  }
}

// Code of dense weights in T.
template <typename T>
constexpr int DENSE = std::is_same_v<T, float> ? FP32 : std::is_same_v<T, at::Half> ? FP16 : BF16;

// Returns x @ weight.T + bias, [..., outputs] in the input's dtype, for weights that are joined by their outputs. With
// `is_padded`, the first row is computed and the others are copies of it.
Tensor packed_product(const Tensor& x, const std::vector<const Packed*>& weights, const std::optional<Tensor>& bias,
                      bool is_padded) {
  const int64_t inputs = x.size(-1), num_rows = is_padded ? 1 : x.numel() / inputs;
  int64_t outputs = 0, num_blocks = 0;
  std::vector<Tensor> sums;
  for (const auto* weight : weights) {
    TORCH_CHECK(inputs == weight->inputs && (!is_dense(weight->code) || weight->codes.scalar_type() == x.scalar_type()),
                "a product of ", x.scalar_type(), x.sizes(), " with a weight of ", weight->inputs, " inputs");
    outputs += weight->outputs, num_blocks += weight->codes.size(0);
    sums.emplace_back();
    if (weight->minima.defined())
      sums.back() = x.to(at::kFloat).reshape({-1, inputs / weight->span, weight->span}).sum(-1);
  }
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  auto out = at::empty(sizes, x.options());
  const Tensor biases = bias ? bias->to(x.scalar_type()).contiguous() : Tensor();
  const auto multiply = [&](auto zero) {
    using T = decltype(zero);
    using E = Element<T>;
    const Tensor factors = std::is_same_v<E, pair> ? x.contiguous() : x.to(at::kFloat).contiguous();
    const int64_t width = inputs / (std::is_same_v<E, pair> ? 2 : 1);
    at::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
      int64_t first = 0, column = 0;  // block and output that a weight begins with
      for (size_t i = 0; i < weights.size(); ++i) {
        const auto& weight = *weights[i];
        const int64_t from = std::max<int64_t>(begin - first, 0), to = std::min(end - first, weight.codes.size(0));
        const Rows<T> rows{static_cast<const E*>(factors.const_data_ptr()), num_rows, width,
                           sums[i].defined() ? sums[i].const_data_ptr<float>() : nullptr, inputs / weight.span,
                           bias ? biases.const_data_ptr<T>() + column : nullptr, out.mutable_data_ptr<T>() + column,
                           outputs, weight.outputs};
        if (from < to && is_dense(weight.code))
          multiply_range<DENSE<T>>(weight, rows, from, to);
        else if (from < to)
          with_code(weight.code, [&](auto code) { multiply_range<code.value>(weight, rows, from, to); });
        first += weight.codes.size(0), column += weight.outputs;
      }
    });
  };
  AT_DISPATCH_SWITCH(x.scalar_type(), "packed_product", AT_DISPATCH_CASE(at::kFloat, [&] { multiply(scalar_t()); })
                     AT_DISPATCH_CASE(at::kBFloat16, [&] { multiply(scalar_t()); })
                     AT_DISPATCH_CASE(at::kHalf, [&] { multiply(scalar_t()); }));
  char* rows = static_cast<char*>(out.mutable_data_ptr());
  const int64_t num_bytes = outputs * out.element_size();
  for (int64_t row = num_rows; row * num_bytes < int64_t(out.nbytes()); ++row)
    std::memcpy(rows + row * num_bytes, rows, num_bytes);
  return out;
}

// Returns rows (outputs) of the weight, dequantised: [len(indices), inputs] fp32.
Tensor packed_rows(const Tensor& indices, const Packed& weight) {
  const int64_t num_groups = weight.codes.size(1), inputs = weight.inputs;
  const Tensor wanted = indices.to(at::kLong).contiguous();
  auto out = at::empty({wanted.numel(), inputs}, at::kFloat);
  const int64_t* rows = wanted.const_data_ptr<int64_t>();
  float* to = out.mutable_data_ptr<float>();
  const Factors scales(weight.scales, weight.steps, inputs / weight.span, weight.shared);
  const Factors minima(weight.minima, weight.min_steps, inputs / weight.span, weight.shared);
  const Zero zero(weight.zero);
  with_code(weight.code, [&](auto code) {
    constexpr int C = code.value;
    at::parallel_for(0, wanted.numel(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        TORCH_CHECK_INDEX(rows[i] >= 0 && rows[i] < weight.outputs, "row ", rows[i], " of ", weight.outputs);
        const int64_t block = rows[i] / LANES, lane = rows[i] % LANES, v = lane / WIDTH, j = lane % WIDTH;
        const uint8_t* group = weight.codes.const_data_ptr<uint8_t>() + block * num_groups * bytes_of(C);
        for (int64_t input = 0; input < inputs; ++input) {
          const int64_t span = input / weight.span;
          const float scale = scales.at(block, span, v)[j];
          const float code_value = decoded<C>(group + input / GROUP * bytes_of(C), input % GROUP, v * WIDTH, zero)[j];
          float value = scale * code_value;
          if (minima) value -= minima.at(block, span, v)[j];
          to[i * inputs + input] = value;
        }
      }
    });
  });
  return out;
}
