// Operators of compiled forwards: linear layers over weights that stay outside the graph, and tree attention.
//
// A graph refers to weights, K/V and the step's plan by the id of a context, an int64 tensor among its inputs, so that
// one compiled graph serves all models of its shapes, and weights or storage may be replaced between two steps.

#include "vectors.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>
#include <torch/version.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

namespace hf_slospec {
namespace {

// A weight [outputs, inputs], packed or as it is.
struct Weight {
  std::shared_ptr<Packed> packed;
  Tensor plain;
};

// Weights of linear layers with the same input, whose outputs are joined.
using Linear = std::vector<Weight>;

struct Layer {
  Tensor keys, values;  // [num_slots, num_kv_heads, dim]
};

// Sequences of a step's batch; see plan_for_operators in cpu/operators.py.
struct Plan {
  Tensor sequences;         // [num_sequences, COLUMNS] int32
  Tensor mask;              // [num_tokens, width] bool
  Tensor windowed_mask;     // the same for layers with a sliding window
  Tensor positions;         // [num_tokens] int32
  Tensor staged_positions;  // [num_sequences, max_staged] int32
};
enum Column { START, PREFIX_LEN, NUM_STAGED, FIRST_TOKEN, NUM_TOKENS, IS_CHAIN, COLUMNS };

struct Context {
  bool is_invariant;  // a token's attention does not depend on what else is in the batch, or on what is staged
  std::vector<Linear> linears;
  std::vector<Layer> layers;
  Plan plan;
};

std::mutex contexts_mutex;
std::map<int64_t, std::shared_ptr<Context>> contexts;

std::shared_ptr<Context> context_of(int64_t id) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  auto found = contexts.find(id);
  TORCH_CHECK(found != contexts.end(), "no context ", id);
  return found->second;
}
std::shared_ptr<Context> context_of(const Tensor& id) { return context_of(*id.const_data_ptr<int64_t>()); }

int64_t new_context(bool is_invariant) {
  static int64_t last = 0;
  std::lock_guard<std::mutex> guard(contexts_mutex);
  contexts[++last] = std::make_shared<Context>(Context{is_invariant, {}, {}, {}});
  return last;
}

// Returns the index in the context of a linear layer of the graph. A piece of a graph numbers its own, and has the
// indices behind the context's id.
int64_t index_in(const Tensor& id, int64_t index) {
  return id.numel() > 1 ? id.const_data_ptr<int64_t>()[1 + index] : index;
}

void delete_context(int64_t id) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  contexts.erase(id);
}

Linear& linear_at(int64_t id, int64_t index) {
  auto& linears = context_of(id)->linears;
  if (index >= int64_t(linears.size())) linears.resize(index + 1);
  return linears[index];
}

void set_pool(int64_t id, at::TensorList keys, at::TensorList values) {
  auto& layers = context_of(id)->layers;
  layers.clear();
  for (size_t i = 0; i < keys.size(); ++i) layers.push_back({keys[i], values[i]});
}

void set_plan(int64_t id, const Tensor& sequences, const Tensor& mask, const Tensor& windowed_mask,
              const Tensor& positions, const Tensor& staged_positions) {
  TORCH_CHECK(sequences.size(1) == COLUMNS, "sequences have ", COLUMNS, " columns");
  context_of(id)->plan = {sequences, mask, windowed_mask, positions, staged_positions};
}

constexpr int64_t MAX_ROWS = 128;  // queries per tile

// Exchanges blocks of S by S elements of two rows of a square matrix.
template <int S>
inline void exchange(vec& a, vec& b) {
  ivec from_a, from_b;
  for (int i = 0; i < WIDTH; ++i) {
    from_a[i] = i & S ? WIDTH + i - S : i;
    from_b[i] = i & S ? WIDTH + i : i + S;
  }
  const vec upper = __builtin_shuffle(a, b, from_a);
  b = __builtin_shuffle(a, b, from_b);
  a = upper;
}

template <int S>
inline void transpose(vec (&rows)[WIDTH]) {
  for (int i = 0; i < WIDTH; ++i)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S]);
  if constexpr (S > 1) transpose<S / 2>(rows);
}

// exp(x) for x <= 0, relative error 2e-7; 0 below -87. Cephes' polynomial.
inline vec exp_of(vec x) {
  const vec is_tiny = x;
  x = x < -87.0f ? vec{} - 87.0f : x;
  const vec shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to the nearest integer in the low bits
  const vec n = shifted - 12582912.0f;
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec exponent = __builtin_convertvector(n, ivec) + 127;
  const ivec bits = exponent << 23;
  vec power;
  std::memcpy(&power, &bits, sizeof power);
  return is_tiny < -87.0f ? vec{} : p * power;
}

// Packed weights, by id.
std::map<int64_t, std::shared_ptr<Packed>> packed_weights;

int64_t new_packed(int64_t code, int64_t zero, int64_t outputs, int64_t inputs, int64_t span, int64_t shared,
                   bool is_invariant, const Tensor& codes, const std::optional<Tensor>& scales,
                   const std::optional<Tensor>& steps, const std::optional<Tensor>& minima,
                   const std::optional<Tensor>& min_steps) {
  static int64_t last = 0;
  std::lock_guard<std::mutex> guard(contexts_mutex);
  packed_weights[++last] = make_packed(code, zero, outputs, inputs, span, shared, is_invariant, codes, scales, steps,
                                       minima, min_steps);
  return last;
}

void delete_packed(int64_t id) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  packed_weights.erase(id);
}

std::shared_ptr<Packed> packed_of(int64_t id) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  return packed_weights.at(id);
}

Tensor packed_product_of(const Tensor& x, int64_t id, const std::optional<Tensor>& bias) {
  return packed_product(x, {packed_of(id).get()}, bias);
}

Tensor packed_rows_of(const Tensor& indices, int64_t id) { return packed_rows(indices, *packed_of(id)); }

// Sets the weights of a linear layer: packed ones by their ids; where that is 0, the next of `plain`.
void set_linear(int64_t id, int64_t index, at::IntArrayRef packed, at::TensorList plain) {
  Linear linear;
  auto next = plain.begin();
  for (const int64_t each : packed) linear.push_back(each ? Weight{packed_of(each), {}} : Weight{nullptr, *next++});
  linear_at(id, index) = std::move(linear);
}

// Returns rows of a context's packed weight: [..., width].
Tensor embedding(const Tensor& indices, const Tensor& id, int64_t index, int64_t width, at::ScalarType dtype) {
  const auto context = context_of(id);
  auto sizes = indices.sizes().vec();
  sizes.push_back(width);
  return packed_rows(indices, *context->linears.at(index_in(id, index)).at(0).packed).to(dtype).view(sizes);
}

// Number of tokens to which a step of one token is padded, as graphs take no fewer; see cpu/twin.py.
constexpr int64_t MIN_SIZE = 2;

Tensor linear(const Tensor& x, const Tensor& id, int64_t index, int64_t outputs) {
  const auto context = context_of(id);
  const auto& linear = context->linears.at(index_in(id, index));
  const bool is_padded = context->plan.positions.numel() == 1 && x.size(-2) == MIN_SIZE &&
                         x.numel() / x.size(-1) == MIN_SIZE;
  std::vector<const Packed*> packed;
  for (const auto& weight : linear)
    if (weight.packed) packed.push_back(weight.packed.get());
  Tensor joined;
  if (packed.size() == linear.size()) {
    joined = packed_product(x, packed, std::nullopt, is_padded);
  } else {
    const Tensor rows = is_padded ? x.narrow(-2, 0, 1) : x;
    std::vector<Tensor> out;
    for (const auto& weight : linear)
      out.push_back(weight.packed ? packed_product(rows, {weight.packed.get()}, std::nullopt)
                                  : at::linear(rows, weight.plain));
    joined = at::cat(out, -1);
    if (is_padded) joined = at::cat({joined, joined}, -2);
  }
  TORCH_CHECK(joined.size(-1) == outputs, "linear layer ", index, " has ", joined.size(-1), " outputs, not ", outputs);
  return joined;
}

// Some tokens of one sequence.
struct Tile {
  const int32_t* sequence;
  int64_t index;   // of the sequence
  int64_t offset;  // among the sequence's tokens in the batch
  int64_t num_tokens;
};

struct Rules {
  double scaling;
  int64_t window, chunk;  // 0: none
  double softcap;         // 0: none
  const float* sinks;     // [num_heads] or null
};

inline int64_t rounded_up(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

constexpr int64_t MIN_TILE_ROWS = 8;  // fewer are multiplied with vectors

// Configures this thread's matrix tiles for attention; returns whether there are any.
inline bool configure_tiles_for_attention() {
#ifdef HAS_TILES
  if (!has_tiles()) return false;
  configure_tiles(TILE_ROWS, 2 * TILE_PAIRS);
  return true;
#else
  return false;
#endif
}

inline void release_tiles() {
#ifdef HAS_TILES
  _tile_release();
#endif
}

// Writes the K or V of the batch's tokens, [1, num_kv_heads, num_tokens, dim], to their slots.
template <typename T>
void stage(const Tensor& fresh, Tensor& stored, const Tensor& sequences) {
  const auto table = sequences.accessor<int32_t, 2>();
  const int64_t num_heads = fresh.size(1), num_bytes = fresh.size(3) * sizeof(T);
  TORCH_CHECK(fresh.stride(3) == 1 && stored.stride(2) == 1, "K and V must be contiguous in their last dimension");
  const T* from = fresh.const_data_ptr<T>();
  T* to = stored.mutable_data_ptr<T>();
  for (int64_t s = 0; s < table.size(0); ++s) {
    const int64_t end = int64_t(table[s][START]) + table[s][PREFIX_LEN] + table[s][NUM_STAGED];
    for (int64_t i = 0; i < table[s][NUM_TOKENS]; ++i)
      for (int64_t head = 0; head < num_heads; ++head)
        std::memcpy(to + (end - table[s][NUM_TOKENS] + i) * stored.stride(0) + head * stored.stride(1),
                    from + head * fresh.stride(1) + (table[s][FIRST_TOKEN] + i) * fresh.stride(2), num_bytes);
  }
}

// Writes n keys, [n, dim], as [dim / elements of E, BLOCK]; columns behind the keys are copies of the last one.
template <typename T, typename E>
inline void pack_keys(const T* from, int64_t stride, int64_t n, int64_t dim, E* to) {
  constexpr int64_t SIZE = std::is_same_v<E, pair> ? 2 : 1;  // elements of T in one of E
  for (int64_t j = 0; j < n; j += WIDTH)
    for (int64_t d = 0; d < dim; d += SIZE * WIDTH) {
      vec rows[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i) {
        const T* key = from + std::min(j + i, n - 1) * stride + d;
        if constexpr (SIZE == 2) {
          rows[i] = vec{};
          std::memcpy(&rows[i], key, std::min<int64_t>(sizeof(vec), (dim - d) * sizeof(T)));
        } else {
          rows[i] = load_some(key, dim - d);
        }
      }
      transpose<WIDTH / 2>(rows);
      for (int64_t i = 0; i < std::min(WIDTH, (dim - d + SIZE - 1) / SIZE); ++i)
        std::memcpy(to + (d / SIZE + i) * BLOCK + j, &rows[i], sizeof(vec));
    }
}

// Writes n values, [n, dim], as [n / elements of E, width].
template <typename T, typename E>
inline void pack_values(const T* from, int64_t stride, int64_t n, int64_t dim, E* to, int64_t width) {
  for (int64_t d = 0; d < dim; d += WIDTH)
    if constexpr (std::is_same_v<E, pair>) {
      for (int64_t j = 0; j < n; j += 2) {
        const vec lower = load_some(from + j * stride + d, dim - d);
        const vec upper = j + 1 < n ? load_some(from + (j + 1) * stride + d, dim - d) : vec{};
        uvec low, high;
        std::memcpy(&low, &lower, sizeof low);
        std::memcpy(&high, &upper, sizeof high);
        const uvec both = low >> 16 | high;  // bf16 is the upper half of a float
        std::memcpy(to + j / 2 * width + d, &both, sizeof both);
      }
    } else {
      for (int64_t j = 0; j < n; ++j) store(to + j * width + d, load_some(from + j * stride + d, dim - d));
    }
}

// Some keys of a sequence and their values.
template <typename T>
struct Keys {
  const T* keys;
  const T* values;
  int64_t key_stride, value_stride;
  const int32_t* positions;  // null: they are a part of the sequence's slots; else these are all seen, but for windows
};

// Attention of one tile's tokens, for the query heads of one KV head; scores and sums in fp32, softmax block by block.
// With `is_invariant`, a token's keys are in blocks by their number on its own path; with `has_tiles`, matrix tiles are
// configured.
template <typename T>
void attend_tile(const Tensor& query, const Layer& layer, const Plan& plan, const Rules& rules, const Tile& tile,
                 int64_t kv_head, bool is_invariant, bool has_tiles, Tensor& out, std::vector<float>& buffer) {
  using E = Element<T>;
  constexpr int64_t SIZE = std::is_same_v<E, pair> ? 2 : 1;  // elements of T in one of E
  const int64_t dim = query.size(3), value_dim = layer.values.size(2), groups = query.size(1) / layer.keys.size(1);
  const int64_t start = tile.sequence[START], prefix_len = tile.sequence[PREFIX_LEN];
  const int64_t first = tile.sequence[FIRST_TOKEN] + tile.offset, num_rows = tile.num_tokens * groups;
  const bool is_chain = tile.sequence[IS_CHAIN], by_position = rules.window || rules.chunk;
  const Tensor& masks = rules.window ? plan.windowed_mask : plan.mask;
  const bool* mask = masks.const_data_ptr<bool>();
  const int64_t mask_width = masks.size(1);
  const int32_t* positions = plan.positions.const_data_ptr<int32_t>();
  const int32_t* staged_positions = plan.staged_positions.const_data_ptr<int32_t>() + tile.index * plan.staged_positions.size(1);
  // Later tokens of a chain are not seen, nor keys before the window of the first uncommitted position.
  const int64_t num_keys = prefix_len + (is_chain ? tile.offset + tile.num_tokens : int64_t(tile.sequence[NUM_STAGED]));
  int64_t low = 0;
  if (rules.window) low = std::max(low, prefix_len - rules.window + 1);
  if (rules.chunk) low = std::max(low, prefix_len / rules.chunk * rules.chunk);
  low = low / BLOCK * BLOCK;

  const bool in_tiles = has_tiles && num_rows >= MIN_TILE_ROWS;
  const int64_t rows_held = in_tiles ? rounded_up(num_rows, TILE_ROWS) : num_rows;  // those behind the tile's tokens are 0
  const int64_t value_width = rounded_up(value_dim, BLOCK);
  const int64_t query_width = in_tiles ? rounded_up(dim, 2 * TILE_PAIRS) / 2 : (dim + SIZE - 1) / SIZE;
  buffer.assign(rows_held * (query_width + 2 * BLOCK + value_width + 2) + BLOCK * (query_width + value_width), 0.0f);
  float* scores = buffer.data();                     // [rows_held, BLOCK]
  float* sums = scores + rows_held * BLOCK;          // [rows_held, value_width]
  float* tops = sums + rows_held * value_width;      // [rows_held], largest score so far
  float* totals = tops + rows_held;                  // [rows_held], sum of weights so far
  E* weights = reinterpret_cast<E*>(totals + rows_held);  // [rows_held, BLOCK / SIZE]
  E* queries = weights + rows_held * BLOCK;          // [rows_held, query_width]
  E* keys = queries + rows_held * query_width;       // [query_width, BLOCK]
  E* values = keys + query_width * BLOCK;            // [BLOCK / SIZE, value_width]
  constexpr float NONE = -std::numeric_limits<float>::infinity();

  const T* query_data = query.const_data_ptr<T>();
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t head = kv_head * groups + row % groups;
    const T* from = query_data + head * query.stride(1) + (first + row / groups) * query.stride(2);
    if constexpr (SIZE == 2)
      std::memcpy(queries + row * query_width, from, dim * sizeof(T));
    else
      for (int64_t d = 0; d < dim; ++d) queries[row * query_width + d] = float(from[d]);
    tops[row] = rules.sinks ? rules.sinks[head] : NONE;
    totals[row] = rules.sinks ? 1.0f : 0.0f;
  }
  const T* key_data = layer.keys.const_data_ptr<T>() + kv_head * layer.keys.stride(1) + start * layer.keys.stride(0);
  const T* value_data =
      layer.values.const_data_ptr<T>() + kv_head * layer.values.stride(1) + start * layer.values.stride(0);
  // out[0:rows][0:BLOCK] += a [rows, n] times b [n, BLOCK]
  const auto multiply = [&](int64_t rows, const E* a, int64_t a_stride, const E* b, int64_t b_stride, int64_t n, float* to,
                            int64_t stride) {
#ifdef HAS_TILES
    if constexpr (std::is_same_v<E, pair>)
      if (in_tiles) return add_tiles(rounded_up(rows, TILE_ROWS), a, a_stride, b, b_stride, n, to, stride);
#endif
    add_product(rows, a, a_stride, b, b_stride, n, to, stride);
  };
  // Adds the keys [begin, begin + n) of the rows [first_row, end_row).
  const auto attend_block = [&](int64_t first_row, int64_t end_row, int64_t begin, int64_t n, const Keys<T>& from) {
    pack_keys(from.keys, from.key_stride, n, dim, keys);
    pack_values(from.values, from.value_stride, n, value_dim, values, value_width);
    int64_t num_value_rows = (n + SIZE - 1) / SIZE;
    if (in_tiles) {  // values of unseen keys are those of an earlier block, whose products with 0 may be NaN
      const int64_t end = rounded_up(num_value_rows, TILE_PAIRS);
      std::fill(values + num_value_rows * value_width, values + end * value_width, E{});
      num_value_rows = end;
    }
    std::fill(scores + first_row * BLOCK, scores + end_row * BLOCK, 0.0f);
    multiply(end_row - first_row, queries + first_row * query_width, query_width, keys, BLOCK, query_width,
             scores + first_row * BLOCK, BLOCK);
    for (int64_t row = first_row; row < end_row; ++row) {
      float* score = scores + row * BLOCK;
      E* weight = weights + row * (BLOCK / SIZE);
      const int64_t token = row / groups;
      for (int64_t c = 0; c < BLOCK; c += WIDTH) store(score + c, load(score + c) * float(rules.scaling));
      if (rules.softcap)
        for (int64_t j = 0; j < n; ++j) score[j] = float(rules.softcap) * std::tanh(score[j] / float(rules.softcap));
      int64_t num_seen = n;  // keys from here on are not seen
      if (from.positions) {
      } else if (is_chain) {
        num_seen = std::clamp<int64_t>(prefix_len + tile.offset + token + 1 - begin, 0, n);
      } else {
        for (int64_t j = std::max<int64_t>(0, prefix_len - begin); j < n; ++j)
          if (!mask[(first + token) * mask_width + begin + j - prefix_len]) score[j] = NONE;
      }
      for (int64_t j = 0; by_position && j < n; ++j) {
        const int64_t key = begin + j, position = positions[first + token];
        const int64_t key_position = from.positions     ? from.positions[j]
                                     : key < prefix_len ? key
                                                        : staged_positions[key - prefix_len];
        if (rules.window && position - key_position >= rules.window) score[j] = NONE;
        if (rules.chunk && position / rules.chunk != key_position / rules.chunk) score[j] = NONE;
      }
      std::fill(score + num_seen, score + BLOCK, NONE);
      vec largest = load(score);
      for (int64_t c = WIDTH; c < BLOCK; c += WIDTH) {
        const vec next = load(score + c);
        largest = largest > next ? largest : next;
      }
      float top = tops[row];
      for (int64_t i = 0; i < WIDTH; ++i) top = std::max(top, largest[i]);
      if (top == NONE) {  // the row has seen no key yet
        std::fill(weight, weight + BLOCK / SIZE, E{});
        continue;
      }
      vec total = {};
      for (int64_t c = 0; c < BLOCK; c += WIDTH) {
        const vec exponentials = exp_of(load(score + c) - top);
        total += exponentials;
        if constexpr (SIZE == 2)
          store_rounded(weight + c / SIZE, exponentials);
        else
          store(weight + c, exponentials);
      }
      if (top != tops[row]) {
        const float kept = std::exp(tops[row] - top);
        totals[row] *= kept;
        for (int64_t d = 0; d < value_width; d += WIDTH)
          store(sums + row * value_width + d, load(sums + row * value_width + d) * kept);
        tops[row] = top;
      }
      for (int64_t i = 0; i < WIDTH; ++i) totals[row] += total[i];
    }
    for (int64_t d = 0; d < value_width; d += BLOCK)
      multiply(end_row - first_row, weights + first_row * (BLOCK / SIZE), BLOCK / SIZE, values + d, value_width,
               num_value_rows, sums + first_row * value_width + d, value_width);
  };
  const int64_t key_stride = layer.keys.stride(0), value_stride = layer.values.stride(0);
  // Blocks of slots that all rows share; a path of a tree has its own blocks from the first one with staged keys on.
  const bool has_paths = is_invariant && !is_chain;
  const int64_t num_shared = has_paths ? prefix_len / BLOCK * BLOCK : num_keys;
  for (int64_t begin = low; begin < num_shared; begin += BLOCK)
    attend_block(0, num_rows, begin, std::min(BLOCK, num_shared - begin),
                 {key_data + begin * key_stride, value_data + begin * value_stride, key_stride, value_stride, nullptr});
  std::vector<T> path_keys, path_values;
  std::vector<int32_t> path_positions;
  for (int64_t token = 0; has_paths && token < tile.num_tokens; ++token) {
    path_keys.clear(), path_values.clear(), path_positions.clear();
    for (int64_t key = num_shared; key < num_keys; ++key) {
      const bool is_staged = key >= prefix_len;
      if (is_staged && !mask[(first + token) * mask_width + key - prefix_len]) continue;
      path_keys.insert(path_keys.end(), key_data + key * key_stride, key_data + key * key_stride + dim);
      const T* value = value_data + key * value_stride;
      path_values.insert(path_values.end(), value, value + value_dim);
      path_positions.push_back(is_staged ? staged_positions[key - prefix_len] : int32_t(key));
    }
    for (int64_t begin = 0; begin < int64_t(path_positions.size()); begin += BLOCK)
      attend_block(token * groups, (token + 1) * groups, num_shared + begin,
                   std::min<int64_t>(BLOCK, path_positions.size() - begin),
                   {&path_keys[begin * dim], &path_values[begin * value_dim], dim, value_dim, &path_positions[begin]});
  }
  T* out_data = out.mutable_data_ptr<T>();
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t head = kv_head * groups + row % groups;
    T* to = out_data + ((first + row / groups) * query.size(1) + head) * value_dim;
    const float scale = totals[row] > 0.0f ? 1.0f / totals[row] : 0.0f;
    for (int64_t d = 0; d < value_dim; ++d) to[d] = T(sums[row * value_width + d] * scale);
  }
}

template <typename T>
void attend_typed(const Tensor& query, const Tensor& key, const Tensor& value, Layer& layer, const Plan& plan,
                  const Rules& rules, bool stages, bool is_invariant, Tensor& out) {
  TORCH_CHECK(query.stride(3) == 1, "queries must be contiguous in their last dimension");
  if (stages) {
    stage<T>(key, layer.keys, plan.sequences);
    stage<T>(value, layer.values, plan.sequences);
  }
  const auto table = plan.sequences.accessor<int32_t, 2>();
  const int64_t num_kv_heads = layer.keys.size(1), groups = query.size(1) / num_kv_heads;
  // Few tiles per thread, as each converts all keys that its tokens see.
  const int64_t num_rows = query.size(2) * groups * num_kv_heads / (2 * at::get_num_threads());
  const int64_t tokens_per_tile = std::max<int64_t>(1, std::clamp<int64_t>(num_rows, 16, MAX_ROWS) / groups);
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < table.size(0); ++s)
    for (int64_t offset = 0; offset < table[s][NUM_TOKENS]; offset += tokens_per_tile)
      tiles.push_back({&table[s][0], s, offset, std::min<int64_t>(tokens_per_tile, table[s][NUM_TOKENS] - offset)});
  // Each thread takes the next task, as later tokens of a sequence see more keys; these come first.
  std::atomic<int64_t> num_left{int64_t(tiles.size()) * num_kv_heads};
  at::parallel_for(0, std::min<int64_t>(num_left, at::get_num_threads()), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer;
    const bool has_tiles = std::is_same_v<Element<T>, pair> && !is_invariant && configure_tiles_for_attention();
    for (int64_t task; (task = --num_left) >= 0;)
      attend_tile<T>(query, layer, plan, rules, tiles[task / num_kv_heads], task % num_kv_heads, is_invariant, has_tiles,
                     out, buffer);
    if (has_tiles) release_tiles();
  });
}

// Stages K and V, if `stages`, and returns attention [1, num_tokens, num_heads, value_dim] of the plan's tokens.
Tensor attend(const Tensor& any_query, const Tensor& any_key, const Tensor& any_value, const Tensor& id, int64_t index,
              bool stages, double scaling, int64_t window, int64_t chunk, double softcap,
              const std::optional<Tensor>& sinks) {
  const auto with_rows = [](const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
  const Tensor query = with_rows(any_query), key = with_rows(any_key), value = with_rows(any_value);
  const auto context = context_of(id);
  auto& layer = context->layers.at(index);
  TORCH_CHECK(query.scalar_type() == layer.keys.scalar_type() && key.scalar_type() == layer.keys.scalar_type() &&
                  value.scalar_type() == layer.values.scalar_type(),
              "layer ", index, " attends in another dtype than it stores");
  // Zeros: tokens of padding belong to no sequence.
  auto out = at::zeros({1, query.size(2), query.size(1), layer.values.size(2)}, query.options());
  std::vector<float> sink_values;
  if (sinks) {
    const auto as_floats = sinks->to(at::kFloat).contiguous();
    sink_values.assign(as_floats.const_data_ptr<float>(), as_floats.const_data_ptr<float>() + as_floats.numel());
  }
  const Rules rules{scaling, window, chunk, softcap, sinks ? sink_values.data() : nullptr};
  const auto typed = [&](auto zero) {
    using T = decltype(zero);
    attend_typed<T>(query, key, value, layer, context->plan, rules, stages, context->is_invariant, out);
  };
  AT_DISPATCH_SWITCH(query.scalar_type(), "attend", AT_DISPATCH_CASE(at::kFloat, [&] { typed(scalar_t()); })
                     AT_DISPATCH_CASE(at::kBFloat16, [&] { typed(scalar_t()); })
                     AT_DISPATCH_CASE(at::kHalf, [&] { typed(scalar_t()); }));
  return out;
}

using Piece = torch::inductor::AOTIModelPackageLoader;
std::map<int64_t, std::shared_ptr<Piece>> loaded_pieces;

// Loads a package of torch's compiler.
int64_t load_piece(const std::string& path) {
  static int64_t last = 0;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 6
  auto piece = std::make_shared<Piece>(path, "model", /*run_single_threaded=*/true);
#else
  auto piece = std::make_shared<Piece>(path);
#endif
  std::lock_guard<std::mutex> guard(contexts_mutex);
  loaded_pieces[++last] = std::move(piece);
  return last;
}

void delete_piece(int64_t id) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  loaded_pieces.erase(id);
}

// Runs the piece whose id is at numbers[0] in `pieces`, with the linear layers at the other numbers in the context.
std::vector<Tensor> run_piece(const Tensor& id, const Tensor& pieces, at::IntArrayRef numbers, at::TensorList inputs) {
  std::shared_ptr<Piece> piece;
  {
    std::lock_guard<std::mutex> guard(contexts_mutex);
    piece = loaded_pieces.at(pieces.const_data_ptr<int64_t>()[numbers[0]]);
  }
  auto table = at::empty({int64_t(numbers.size())}, id.options());
  int64_t* to = table.mutable_data_ptr<int64_t>();
  std::copy(numbers.begin(), numbers.end(), to);
  *to = *id.const_data_ptr<int64_t>();
  auto arguments = inputs.vec();
  arguments.push_back(std::move(table));
  return piece->run(arguments);
}

}  // namespace

// Called by compiled pieces, which thus need no dispatcher; see SHIMS in cpu/operators.py.
extern "C" AOTITorchError aoti_torch_cpu_context_linear(AtenTensorHandle x, AtenTensorHandle id, int64_t index,
                                                        int64_t outputs, AtenTensorHandle* out) {
  using torch::aot_inductor::tensor_handle_to_tensor_pointer;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto made = linear(*tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(id), index, outputs);
    *out = torch::aot_inductor::tensor_pointer_to_tensor_handle(new Tensor(std::move(made)));
  });
}

// Functions without a backend's name serve all of them, packed weights of oneDNN and MKL included.
TORCH_LIBRARY(hf_slospec, library) {
  library.def("new_context(bool is_invariant) -> int", new_context);
  library.def("delete_context(int id) -> ()", delete_context);
  library.def("set_linear(int id, int index, int[] packed, Tensor[] plain) -> ()", set_linear);
  library.def("new_packed(int code, int zero, int outputs, int inputs, int span, int shared, bool is_invariant, "
              "Tensor codes, Tensor? scales, Tensor? steps, Tensor? minima, Tensor? min_steps) -> int", new_packed);
  library.def("delete_packed(int id) -> ()", delete_packed);
  library.def("packed_product(Tensor x, int id, Tensor? bias) -> Tensor", packed_product_of);
  library.def("packed_rows(Tensor indices, int id) -> Tensor", packed_rows_of);
  library.def("load_piece(str path) -> int", load_piece);
  library.def("delete_piece(int id) -> ()", delete_piece);
  library.def("set_pool(int id, Tensor[] keys, Tensor[] values) -> ()", set_pool);
  library.def("set_plan(int id, Tensor sequences, Tensor mask, Tensor windowed_mask, Tensor positions, "
              "Tensor staged_positions) -> ()", set_plan);
}
TORCH_LIBRARY_IMPL(hf_slospec, CPU, library) {
  library.impl("context_linear", linear);
  library.impl("attend", attend);
  library.impl("embedding", embedding);
  library.impl("run_piece", run_piece);
}
}  // namespace hf_slospec
