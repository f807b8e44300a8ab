// Vectors of sixteen numbers: one AVX-512 register, or several narrower ones as the compiler sees
// fit.
//
// GCC's and Clang's vector extensions carry everything but the products of bytes, which have a path
// for AVX-512 VNNI, one for AVX2, and a plain one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fullbore {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

#define FULLBORE_INLINE static inline __attribute__((always_inline))

// Asks for a line of memory that is read soon, into the second-level cache.
FULLBORE_INLINE void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

template <class Vector, class Number>
FULLBORE_INLINE Vector load(const Number* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

FULLBORE_INLINE f32x16 load_f32(const float* from) { return load<f32x16>(from); }

template <class Vector, class Number>
FULLBORE_INLINE void store(Number* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

FULLBORE_INLINE f32x16 splat(float x) { return f32x16{} + x; }
FULLBORE_INLINE i32x16 splat(int32_t x) { return i32x16{} + x; }
FULLBORE_INLINE f32x16 to_f32(i32x16 v) { return __builtin_convertvector(v, f32x16); }
FULLBORE_INLINE i32x16 bits(f32x16 v) { return (i32x16)v; }
FULLBORE_INLINE f32x16 from_bits(i32x16 v) { return (f32x16)v; }
FULLBORE_INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
FULLBORE_INLINE f32x16 abs(f32x16 v) { return from_bits(bits(v) & 0x7fffffff); }

// bf16 is the upper half of fp32. GCC converts vectors of narrow numbers one by one, hence the
// intrinsics here and below.
FULLBORE_INLINE f32x16 load_bf16(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return (f32x16)_mm512_slli_epi32(wide, 16);
#else
  return from_bits(__builtin_convertvector(load<u16x16>(from), i32x16) << 16);
#endif
}

// To the nearest, ties to even. NaN and infinity do not occur where this is used.
FULLBORE_INLINE u16x16 to_bf16(f32x16 v) {
  const i32x16 u = bits(v);
  const i32x16 rounded = u + 0x7fff + ((u >> 16) & 1);
  return __builtin_convertvector((rounded >> 16) & 0xffff, u16x16);
}

FULLBORE_INLINE f32x16 load_i8(const int8_t* from) {
#if defined(__AVX512F__)
  return to_f32((i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  union {
    __m256i half[2];
    i32x16 whole;
  } wide = {{_mm256_cvtepi8_epi32(_mm_loadu_si64(from)),
             _mm256_cvtepi8_epi32(_mm_loadu_si64(from + 8))}};
  return to_f32(wide.whole);
#else
  return to_f32(__builtin_convertvector(load<i8x16>(from), i32x16));
#endif
}

// To the nearest, ties to even, for magnitudes below 2^22.
FULLBORE_INLINE f32x16 round(f32x16 v) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23
  return (v + magic) - magic;
}

// What numbers are multiplied with to become codes, the largest magnitude 127.
FULLBORE_INLINE float per_code(float most) { return most > 1e-36f ? 127.0f / most : 0.0f; }

FULLBORE_INLINE float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
#endif
}

FULLBORE_INLINE float largest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float found = v[0];
  for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
  return found;
#endif
}

#if defined(__clang__) || __GNUC__ >= 12
#define FULLBORE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FULLBORE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i32x16{__VA_ARGS__})
#endif

// The sum of each of sixteen vectors, in their order.
FULLBORE_INLINE f32x16 sums_of(const float (*rows)[LANES]) {
  f32x16 two[8], four[4], eight[2];
  for (int i = 0; i < 8; i++) {
    const f32x16 a = load_f32(rows[2 * i]), b = load_f32(rows[2 * i + 1]);
    two[i] =
        FULLBORE_SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
        FULLBORE_SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (int i = 0; i < 4; i++) {
    const f32x16 a = two[2 * i], b = two[2 * i + 1];
    four[i] =
        FULLBORE_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
        FULLBORE_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 2; i++) {
    const f32x16 a = four[2 * i], b = four[2 * i + 1];
    eight[i] =
        FULLBORE_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
        FULLBORE_SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  const f32x16 a = eight[0], b = eight[1];
  return FULLBORE_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         FULLBORE_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// e^x to two units in the last place, by Cephes' polynomial; below -87 it is 0, above 88 it is
// e^88.
FULLBORE_INLINE f32x16 exp(f32x16 x) {
  x = x > 88.0f ? splat(88.0f) : x;
  const f32x16 n = round(x * 1.44269504088896341f);
  const f32x16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const f32x16 power = from_bits((__builtin_convertvector(n, i32x16) + 127) << 23);
  return x < -87.0f ? f32x16{} : p * power;
}

// sums + a · b by bytes: each of the sixteen sums takes four products.
FULLBORE_INLINE i32x16 dot_bytes(i32x16 sums, i32x16 unsigned_bytes, i32x16 signed_bytes) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVX2__)
  // Widened to 16 bits: products of pairs of bytes themselves would overflow.
  union {
    i32x16 whole;
    __m256i half[2];
  } total = {sums}, a = {unsigned_bytes}, b = {signed_bytes};
  const __m256i low = _mm256_set1_epi32(0x00ff00ff);
  for (int i = 0; i < 2; i++) {
    const __m256i even = _mm256_madd_epi16(
        _mm256_and_si256(a.half[i], low), _mm256_srai_epi16(_mm256_slli_epi16(b.half[i], 8), 8));
    const __m256i odd =
        _mm256_madd_epi16(_mm256_srli_epi16(a.half[i], 8), _mm256_srai_epi16(b.half[i], 8));
    total.half[i] = _mm256_add_epi32(total.half[i], _mm256_add_epi32(even, odd));
  }
  return total.whole;
#else
  for (int byte = 0; byte < 4; byte++) {
    const i32x16 a = (unsigned_bytes >> (8 * byte)) & 0xff;
    const i32x16 b = (signed_bytes << (24 - 8 * byte)) >> 24;
    sums += a * b;
  }
  return sums;
#endif
}

}  // namespace fullbore
