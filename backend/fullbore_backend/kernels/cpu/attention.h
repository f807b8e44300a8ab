// Attention on the pages of the cache: a step's new keys and values go in, then every token
// attends.
//
// A work item is one KV head of one sequence, with all query heads that share it, so that its pages
// are read once for them. A single new token reads the pages as they are. Several new tokens first
// have keys turned, sixteen tokens to a vector, so that scores need no sums across a vector.
#pragma once

#include "simd.h"

#include <algorithm>
#include <limits>

namespace fullbore {

constexpr int AHEAD = 24;  // tokens whose keys are asked for before they are read

enum class Stored : int32_t { f32 = 0, bf16 = 1, i8 = 2 };

// One layer's pages: (blocks, block_size, kv_heads, dim), scales (blocks, block_size, kv_heads).
struct Pages {
  void* k;
  void* v;
  float* k_scale;  // of int8, else null
  float* v_scale;
};

struct Shape {
  int32_t heads, kv_heads, dim, block_size;
  Stored stored;
  float scale;
};

template <Stored KIND>
FULLBORE_INLINE f32x16 load_stored(const void* rows, size_t at) {
  if constexpr (KIND == Stored::f32) return load_f32(static_cast<const float*>(rows) + at);
  if constexpr (KIND == Stored::bf16) return load_bf16(static_cast<const uint16_t*>(rows) + at);
  if constexpr (KIND == Stored::i8) return load_i8(static_cast<const int8_t*>(rows) + at);
}

// Writes one token's key or value of one head.
inline void store_head(const float* x, const Shape& s, void* rows, float* scales, int64_t slot,
                       int head) {
  const size_t row = size_t(slot) * s.kv_heads + head, at = row * s.dim;
  if (s.stored == Stored::f32) {
    std::memcpy(static_cast<float*>(rows) + at, x, size_t(s.dim) * sizeof(float));
  } else if (s.stored == Stored::bf16) {
    auto* to = static_cast<uint16_t*>(rows) + at;
    for (int i = 0; i < s.dim; i += LANES) store(to + i, to_bf16(load_f32(x + i)));
  } else {
    f32x16 magnitude{};
    for (int i = 0; i < s.dim; i += LANES) magnitude = max(magnitude, abs(load_f32(x + i)));
    const float most = largest(magnitude), factor = per_code(most);
    auto* to = static_cast<int8_t*>(rows) + at;
    for (int i = 0; i < s.dim; i += LANES) {
      const f32x16 code = round(load_f32(x + i) * factor);
      store(to + i, __builtin_convertvector(__builtin_convertvector(code, i32x16), i8x16));
    }
    scales[row] = most / 127.0f;
  }
}

// Scores become weights that sum to one; returns with `scores` holding e^(score - largest) and gives
// one over their sum. What is behind `count`, up to a whole vector, becomes 0.
FULLBORE_INLINE float soft_max(float* scores, int count) {
  const int padded = (count + LANES - 1) / LANES * LANES;
  for (int i = count; i < padded; i++) scores[i] = -std::numeric_limits<float>::infinity();
  f32x16 most = splat(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < padded; i += LANES) most = max(most, load_f32(scores + i));
  const f32x16 top = splat(largest(most));
  f32x16 total{};
  for (int i = 0; i < padded; i += LANES) {
    const f32x16 weight = exp(load_f32(scores + i) - top);
    store(scores + i, weight);
    total += weight;
  }
  return 1.0f / sum(total);
}

// Where a sequence's tokens are.
struct Context {
  const int32_t* slots;  // of all its tokens
  int begin, end;        // the tokens that are seen: a window may begin after the first

  int length() const { return end - begin; }
};

// Slots of a sequence's tokens, from the blocks that it has.
inline void find_slots(const int32_t* blocks, int block_size, int length, int32_t* slots) {
  for (int first = 0; first < length; first += block_size, blocks++)
    for (int i = 0; i < block_size && first + i < length; i++)
      slots[first + i] = *blocks * block_size + i;
}

// Asks for a token's key or value of one head, which is read soon.
template <int D, Stored KIND>
FULLBORE_INLINE void prefetch_row(const void* rows, size_t row) {
  constexpr size_t bytes = D * LANES * (KIND == Stored::f32 ? 4 : KIND == Stored::bf16 ? 2 : 1);
  const char* at = static_cast<const char*>(rows) + row * bytes;
  for (size_t line = 0; line < bytes; line += 64) prefetch(at + line);
}

// `COUNT` query heads of a single new token; D vectors of 16 make a head.
template <int D, Stored KIND, int COUNT>
inline void decode_heads(const float* query, const Shape& s, const Pages& p, const Context& c,
                         int kv_head, float* scratch, float* out) {
  const int length = c.length(), stride = (length + LANES - 1) / LANES * LANES;
  const int32_t* slots = c.slots + c.begin;
  f32x16 q[COUNT][D];
  for (int h = 0; h < COUNT; h++)
    for (int i = 0; i < D; i++) q[h][i] = load_f32(query + h * s.dim + i * LANES) * s.scale;
  const auto row_of = [&](int t) { return size_t(slots[t]) * s.kv_heads + kv_head; };
  // Sixteen tokens' products are added up together, which takes a third of one after the other.
  alignas(64) float products[COUNT][LANES][LANES], scales[LANES];
  for (int first = 0; first < length; first += LANES) {
    for (int t = 0; t < LANES; t++) {
      const int at = std::min(first + t, length - 1);
      const size_t row = row_of(at);
      prefetch_row<D, KIND>(p.k, row_of(std::min(at + AHEAD, length - 1)));
      prefetch_row<D, KIND>(p.v, row);
      f32x16 total[COUNT] = {};
      for (int i = 0; i < D; i++) {
        const f32x16 key = load_stored<KIND>(p.k, row * s.dim + i * LANES);
        for (int h = 0; h < COUNT; h++) total[h] += q[h][i] * key;
      }
      for (int h = 0; h < COUNT; h++) store(products[h][t], total[h]);
      if (KIND == Stored::i8) scales[t] = p.k_scale[row];
    }
    for (int h = 0; h < COUNT; h++) {
      f32x16 scores = sums_of(products[h]);
      if (KIND == Stored::i8) scores *= load_f32(scales);
      store(scratch + h * stride + first, scores);
    }
  }
  float shares[COUNT];
  for (int h = 0; h < COUNT; h++) shares[h] = soft_max(scratch + h * stride, length);
  f32x16 sums[COUNT][D] = {};
  for (int t = 0; t < length; t++) {
    const size_t row = row_of(t);
    const float scale = KIND == Stored::i8 ? p.v_scale[row] : 1.0f;
    f32x16 value[D];
    for (int i = 0; i < D; i++) value[i] = load_stored<KIND>(p.v, row * s.dim + i * LANES);
    for (int h = 0; h < COUNT; h++) {
      const float weight = scratch[h * stride + t] * scale;
      for (int i = 0; i < D; i++) sums[h][i] += value[i] * weight;
    }
  }
  for (int h = 0; h < COUNT; h++)
    for (int i = 0; i < D; i++) store(out + h * s.dim + i * LANES, sums[h][i] * shares[h]);
}

// All query heads of a KV head, for a single new token.
template <int D, Stored KIND>
inline void decode(const float* query, const Shape& s, const Pages& p, const Context& c,
                   int kv_head, float* scratch, float* out) {
  const int group = s.heads / s.kv_heads;
  for (int h = 0; h < group;) {
    const float* q = query + h * s.dim;
    float* o = out + h * s.dim;
    const int left = group - h;
    if (left >= 4 && D <= 4) {
      decode_heads<D, KIND, 4>(q, s, p, c, kv_head, scratch, o), h += 4;
    } else if (left >= 3 && D <= 6) {
      decode_heads<D, KIND, 3>(q, s, p, c, kv_head, scratch, o), h += 3;
    } else if (left >= 2) {
      decode_heads<D, KIND, 2>(q, s, p, c, kv_head, scratch, o), h += 2;
    } else {
      decode_heads<D, KIND, 1>(q, s, p, c, kv_head, scratch, o), h += 1;
    }
  }
}

// A sequence's keys, turned, and its values, in fp32: what several new tokens attend to.
struct Gathered {
  float* keys;    // (vectors of tokens, dim, 16)
  float* values;  // (tokens, dim)
};

template <Stored KIND>
inline void gather(const Shape& s, const Pages& p, const Context& c, int kv_head,
                   const Gathered& to) {
  const int length = c.length(), padded = (length + LANES - 1) / LANES * LANES;
  for (int t = 0; t < padded; t++) {
    float* turned = to.keys + size_t(t / LANES) * s.dim * LANES + t % LANES;
    if (t >= length) {
      for (int i = 0; i < s.dim; i++) turned[size_t(i) * LANES] = 0;
      continue;
    }
    const size_t row = size_t(c.slots[c.begin + t]) * s.kv_heads + kv_head;
    const float k_scale = KIND == Stored::i8 ? p.k_scale[row] : 1.0f;
    const float v_scale = KIND == Stored::i8 ? p.v_scale[row] : 1.0f;
    for (int i = 0; i < s.dim; i += LANES) {
      const f32x16 key = load_stored<KIND>(p.k, row * s.dim + i) * k_scale;
      for (int j = 0; j < LANES; j++) turned[size_t(i + j) * LANES] = key[j];
      store(to.values + size_t(t) * s.dim + i,
            load_stored<KIND>(p.v, row * s.dim + i) * v_scale);
    }
  }
}

// COUNT rows, each a head of a new token, that see tokens from[r] to to[r] of what was gathered.
template <int D, int COUNT>
inline void attend_rows(const float* const (&query)[COUNT], float* const (&out)[COUNT],
                        const int (&from)[COUNT], const int (&to)[COUNT], const Shape& s,
                        const Gathered& g, float* scratch, int stride) {
  const int first = *std::min_element(from, from + COUNT) / LANES;
  const int last = (*std::max_element(to, to + COUNT) + LANES - 1) / LANES;
  for (int at = first; at < last; at += 2) {
    const int both = at + 1 < last ? 1 : 0;
    const float* keys = g.keys + size_t(at) * s.dim * LANES;
    const float* more = keys + size_t(both) * s.dim * LANES;
    f32x16 scores[COUNT][2] = {};
    for (int i = 0; i < s.dim; i++) {
      const f32x16 low = load_f32(keys + i * LANES), high = load_f32(more + i * LANES);
      for (int r = 0; r < COUNT; r++) {
        scores[r][0] += low * query[r][i];
        scores[r][1] += high * query[r][i];
      }
    }
    for (int r = 0; r < COUNT; r++) {
      store(scratch + r * stride + at * LANES, scores[r][0] * s.scale);
      if (both) store(scratch + r * stride + (at + 1) * LANES, scores[r][1] * s.scale);
    }
  }
  const int start = first * LANES;
  float shares[COUNT];
  for (int r = 0; r < COUNT; r++) {
    float* mine = scratch + r * stride;
    for (int t = start; t < from[r]; t++) mine[t] = -std::numeric_limits<float>::infinity();
    shares[r] = soft_max(mine + start, to[r] - start);
    for (int t = (to[r] + LANES - 1) / LANES * LANES; t < last * LANES; t++) mine[t] = 0;
  }
  f32x16 sums[COUNT][D] = {};
  const int end = *std::max_element(to, to + COUNT);
  for (int t = start; t < end; t++) {
    f32x16 value[D];
    for (int i = 0; i < D; i++) value[i] = load_f32(g.values + size_t(t) * s.dim + i * LANES);
    for (int r = 0; r < COUNT; r++) {
      const float weight = scratch[r * stride + t];
      for (int i = 0; i < D; i++) sums[r][i] += value[i] * weight;
    }
  }
  for (int r = 0; r < COUNT; r++)
    for (int i = 0; i < D; i++) store(out[r] + i * LANES, sums[r][i] * shares[r]);
}

}  // namespace fullbore
