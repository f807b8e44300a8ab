// Products of int8 weights and int8 activations, both scaled by groups of GROUP inputs.
//
// Weights come in panels of PANEL rows that lie as they are read: for each group its scales in bf16,
// then its codes, four inputs of sixteen rows to a vector. So a product with one token reads memory
// from one end to the other. Codes are stored plus 128, since the instruction multiplies unsigned
// bytes by signed ones; 128 times the sum of the activations is taken off before the first product.
#pragma once

#include "simd.h"
#include "team.h"

namespace fullbore {

constexpr int GROUP = 64;
constexpr int PANEL = 2 * LANES;
constexpr int GROUP_BYTES = PANEL * 2 + PANEL * GROUP;
constexpr int LINE = 64;   // bytes that memory is read by
constexpr int TOKENS = 6;  // of a tile: their sums and a panel's part of them fill the registers

// A weight as Python packed it; see pack.py.
struct Weight {
  const uint8_t* panels;
  const float* bias;  // (rows,) or null
  int32_t rows;       // a multiple of PANEL, zeros at the end
  int32_t inputs;     // a multiple of GROUP, zeros at the end

  int groups() const { return inputs / GROUP; }
  int count() const { return rows / PANEL; }
  const uint8_t* panel(int number) const {
    return panels + size_t(number) * groups() * GROUP_BYTES;
  }
};

// Tokens in int8: codes (tokens, inputs), and of each group its scale and its codes' sum.
struct Quantized {
  int8_t* codes;
  float* scales;
  int32_t* sums;
};

// Quantises one token's group: 127 stands for its largest magnitude.
FULLBORE_INLINE void quantize_group(const f32x16 (&x)[GROUP / LANES], int8_t* codes, float* scale,
                                    int32_t* total) {
  f32x16 magnitude = abs(x[0]);
  for (int i = 1; i < GROUP / LANES; i++) magnitude = max(magnitude, abs(x[i]));
  const float most = largest(magnitude);
  const float factor = per_code(most);
  f32x16 totals{};
  for (int i = 0; i < GROUP / LANES; i++) {
    const f32x16 code = round(x[i] * factor);
    totals += code;
    store(codes + i * LANES,
          __builtin_convertvector(__builtin_convertvector(code, i32x16), i8x16));
  }
  const float all = sum(totals);
  *scale = most / 127.0f + 0.0f * all;  // NaN stays NaN
  *total = all == all ? int32_t(all) : 0;
}

// Quantises a token of `size` numbers, padded with zeros to whole groups.
inline void quantize_token(const float* x, int size, int token, int groups, const Quantized& out) {
  for (int group = 0; group < groups; group++) {
    f32x16 part[GROUP / LANES];
    for (int i = 0; i < GROUP / LANES; i++) {
      const int at = group * GROUP + i * LANES;
      if (at + LANES <= size) {
        part[i] = load_f32(x + at);
      } else {
        float rest[LANES] = {};
        for (int j = at; j < size; j++) rest[j - at] = x[j];
        part[i] = load_f32(rest);
      }
    }
    const size_t place = size_t(token) * groups + group;
    quantize_group(part, out.codes + place * GROUP, out.scales + place, out.sums + place);
  }
}

// One panel times COUNT tokens from `token` on: (COUNT, PANEL) sums in fp32. Meanwhile `lines` lines
// of memory for each group are fetched from `ahead` on.
template <int COUNT>
FULLBORE_INLINE void multiply(const uint8_t* panel, int groups, const Quantized& x, int token,
                              const uint8_t* ahead, int lines, f32x16 (&out)[COUNT][2]) {
  for (auto& sums : out) sums[0] = sums[1] = f32x16{};
  const size_t first = size_t(token) * groups;
  const int8_t* codes = x.codes + first * GROUP;
  for (int group = 0; group < groups; group++) {
    const uint8_t* weights = panel + PANEL * 2;
    for (int line = 0; line < lines; line++, ahead += LINE) prefetch(ahead);
    i32x16 sums[COUNT][2];
    for (int t = 0; t < COUNT; t++) {
      sums[t][0] = sums[t][1] = splat(-128 * x.sums[first + size_t(t) * groups + group]);
    }
    for (int step = 0; step < GROUP / 4; step++) {
      const i32x16 low = load<i32x16>(weights + step * 128);
      const i32x16 high = load<i32x16>(weights + step * 128 + 64);
      for (int t = 0; t < COUNT; t++) {
        int32_t four;
        std::memcpy(&four, codes + (size_t(t) * groups + group) * GROUP + step * 4, 4);
        const i32x16 activation = splat(four);
        sums[t][0] = dot_bytes(sums[t][0], low, activation);
        sums[t][1] = dot_bytes(sums[t][1], high, activation);
      }
    }
    const auto* scales = reinterpret_cast<const uint16_t*>(panel);
    const f32x16 low = load_bf16(scales), high = load_bf16(scales + LANES);
    for (int t = 0; t < COUNT; t++) {
      const float scale = x.scales[first + size_t(t) * groups + group];
      out[t][0] += to_f32(sums[t][0]) * (low * scale);
      out[t][1] += to_f32(sums[t][1]) * (high * scale);
    }
    panel += GROUP_BYTES;
  }
}

// Tile `tile` of `tiles`: each fetches its part of the next panel.
template <int COUNT, class Finish>
inline void multiply_and_finish(const Weight& w, int number, const Quantized& x, int token,
                                int tile, int tiles, const Finish& finish) {
  f32x16 sums[COUNT][2];
  const int lines = (GROUP_BYTES / LINE + tiles - 1) / tiles;
  const uint8_t* ahead = w.panel(number + 1) + size_t(tile) * lines * w.groups() * LINE;
  multiply<COUNT>(w.panel(number), w.groups(), x, token, ahead, lines, sums);
  for (int t = 0; t < COUNT; t++) {
    if (w.bias) {
      sums[t][0] += load_f32(w.bias + number * PANEL);
      sums[t][1] += load_f32(w.bias + number * PANEL + LANES);
    }
    finish(token + t, number * PANEL, sums[t][0], sums[t][1]);
  }
}

// A thread's share of a product with `tokens` tokens. finish(token, row, low, high) takes each
// token's results of a panel's 32 rows, of which `row` is the first.
template <class Finish>
inline void product(const Weight& w, const Quantized& x, int tokens, int rank, int size,
                    const Finish& finish) {
  const int tiles = (tokens + TOKENS - 1) / TOKENS;
  const Share share(w.count() * tiles, rank, size);
  for (int item = share.begin; item < share.end; item++) {
    const int number = item / tiles, at = item % tiles;
    const Share tile(tokens, at, tiles);
    const int token = tile.begin;
    switch (tile.end - tile.begin) {
      case 1: multiply_and_finish<1>(w, number, x, token, at, tiles, finish); break;
      case 2: multiply_and_finish<2>(w, number, x, token, at, tiles, finish); break;
      case 3: multiply_and_finish<3>(w, number, x, token, at, tiles, finish); break;
      case 4: multiply_and_finish<4>(w, number, x, token, at, tiles, finish); break;
      case 5: multiply_and_finish<5>(w, number, x, token, at, tiles, finish); break;
      case 6: multiply_and_finish<6>(w, number, x, token, at, tiles, finish); break;
    }
  }
}

}  // namespace fullbore
