// Vectors of floats as wide as the machine's registers, by the compiler's extension.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jaxspec {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

// Bits of a bfloat16: the upper half of a float's.
struct Bfloat16 {
  uint16_t bits;
};

// 8-bit float, e4m3: no infinities; all ones after the sign are NaN.
struct StoredFloat8 {
  uint8_t bits;
};

// 8-bit integer; its scale is stored elsewhere.
struct StoredInt8 {
  int8_t value;
};

inline Floats load(const float* from) {
  Floats found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

inline Floats load(const Bfloat16* from) {
#if defined(__AVX512F__)
  // Compilers make five instructions of the general shape below.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
  Halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Words wide = __builtin_convertvector(bits, Words) << 16;
  Floats found;
  std::memcpy(&found, &wide, sizeof(found));
  return found;
#endif
}

// kLanes signed 8-bit integers.
inline Ints load_bytes(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Ints);
#endif
}

inline Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

inline Floats load(const StoredInt8* from) { return to_floats(load_bytes(from)); }

// e4m3 to float32, except NaN. The exponent's bias is 7, that of float32 is 127. Below
// 2^-6 numbers are multiples of 2^-9; they are not built from denormal floats, which
// threads of XLA may flush to zero.
inline Floats of_float8(Ints bits) {
  const Ints size = bits & 0x7f;
  const Floats normal = (Floats)((size << 20) + (120 << 23));
  const Floats small = to_floats(size) * (1.0f / 512);
  const Floats found = size < 8 ? small : normal;
  return (Floats)((Ints)found | (bits & INT32_MIN));
}

inline Floats load(const StoredFloat8* from) {
  const Ints bits = load_bytes(from);
  const Floats nan = (Floats)(Ints{} + 0x7fc00000);
  return (bits & 0x7f) == 0x7f ? nan : of_float8(bits);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof(values)); }

// The first `count` lanes; the others are 0.
template <typename Value>
inline Floats load_some(const Value* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Value lanes[kLanes] = {};
  for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
  return load(lanes);
}

inline void store_some(float* to, Floats values, int64_t count) {
  if (count >= kLanes) return store(to, values);
  float lanes[kLanes];
  store(lanes, values);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define JAXSPEC_CAN_SHUFFLE
#endif
#endif

#if defined(JAXSPEC_CAN_SHUFFLE)
// Exchanges the upper lanes of the first with the lower ones of the second, in blocks of
// `Half` lanes.
template <int Half, int... Lane>
inline void exchange(Floats& first, Floats& second, std::integer_sequence<int, Lane...>) {
  const Floats lower = __builtin_shufflevector(
      first, second, (Lane & Half ? kLanes + Lane - Half : Lane)...);
  second = __builtin_shufflevector(first, second,
                                   (Lane & Half ? kLanes + Lane : Lane + Half)...);
  first = lower;
}

template <int Half>
inline void exchange_all(Floats (&rows)[kLanes]) {
  if constexpr (Half > 0) {
    for (int row = 0; row < kLanes; ++row)
      if (!(row & Half))
        exchange<Half>(rows[row], rows[row | Half],
                       std::make_integer_sequence<int, kLanes>());
    exchange_all<Half / 2>(rows);
  }
}
#endif

// Transposes a square of lanes.
inline void transpose(Floats (&rows)[kLanes]) {
#if defined(JAXSPEC_CAN_SHUFFLE)
  exchange_all<kLanes / 2>(rows);
#else
  float from[kLanes][kLanes], to[kLanes][kLanes];
  std::memcpy(from, rows, sizeof(from));
  for (int row = 0; row < kLanes; ++row)
    for (int lane = 0; lane < kLanes; ++lane) to[lane][row] = from[row][lane];
  std::memcpy(rows, to, sizeof(to));
#endif
}

inline float widen(float value) { return value; }

inline float widen(Bfloat16 value) {
  const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
  float found;
  std::memcpy(&found, &wide, sizeof(found));
  return found;
}

// Rounds to nearest, ties to even; NaN remains NaN.
inline Bfloat16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float widen(StoredInt8 value) { return value.value; }

inline float widen(StoredFloat8 value) {
  const uint32_t size = value.bits & 0x7f;
  uint32_t bits = size == 0x7f ? 0x7fc00000 : (size << 20) + (120u << 23);
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  if (size < 8) found = size * (1.0f / 512);
  return value.bits & 0x80 ? -found : found;
}

// As `narrow`; saturates at 448, the largest number.
inline StoredFloat8 to_float8(float value) {
  constexpr float kMost = 448.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint8_t sign = bits >> 24 & 0x80;
  if (value != value) return {static_cast<uint8_t>(sign | 0x7f)};
  float size = value < 0 ? -value : value;
  size = size > kMost ? kMost : size;
  if (size < 1.0f / 64) {
    // Adding 2^14 rounds to multiples of 2^-9.
    size += 16384.0f;
    std::memcpy(&bits, &size, sizeof(bits));
    return {static_cast<uint8_t>(sign | (bits & 0xf))};
  }
  std::memcpy(&bits, &size, sizeof(bits));
  bits += 0x7ffff + (bits >> 20 & 1);
  return {static_cast<uint8_t>(sign | ((bits >> 20) - (120 << 3)))};
}

inline void put(float* to, float value) { *to = value; }
inline void put(StoredFloat8* to, float value) { *to = to_float8(value); }
inline void put(Bfloat16* to, float value) { *to = narrow(value); }

// Not `Floats{} + value`: that addition would turn -0 into 0.
inline Floats splat(float value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (Floats)_mm256_set1_ps(value);
#else
  return Floats{value, value, value, value};
#endif
}

// sum + first * second; with AVX-512 in one rounding, whatever compilers make of others.
inline Floats add_product(Floats sum, Floats first, Floats second) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)first, (__m512)second, (__m512)sum);
#else
  return sum + first * second;
#endif
}

inline Floats select(Ints condition, Floats yes, Floats no) {
  return condition ? yes : no;
}

// The sum of all lanes: first of those half a vector apart, then a quarter, ...
inline float sum_of(Floats values) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 halves = _mm256_add_ps(
      _mm512_castps512_ps256((__m512)values),
      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)values), 1)));
#else
  const __m256 halves = (__m256)values;
#endif
  const __m128 four =
      _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[kLanes];
  store(lanes, values);
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

// Dot product of two rows.
template <typename Value>
inline float dot(const float* first, const Value* second, int64_t size) {
  Floats sums = {};
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes)
    sums += load(first + at) * load(second + at);
  float sum = sum_of(sums);
  for (; at < size; ++at) sum += first[at] * widen(second[at]);
  return sum;
}

inline float max_of(Floats values) {
  float lanes[kLanes];
  store(lanes, values);
  float most = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
  return most;
}

// exp(x) = two_to_n * (1 + rest), where n is an integer; NaN remains NaN.
struct Exponential {
  Floats two_to_n, rest;
};

inline Exponential exponential(Floats x) {
  // Beyond, the result is 0 or infinite in float32, except for denormal numbers.
  x = select(x < splat(-87.0f), splat(-87.0f), x);
  x = select(x > splat(88.0f), splat(88.0f), x);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers
  const Floats shifted = x * 1.44269504088896f + splat(kRound);
  const Floats n = shifted - splat(kRound);
  // ln 2 in two parts: n times the first is exact.
  const Floats r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  // The Taylor series of exp(r) - 1, |r| <= ln(2) / 2: off by less than 1e-8.
  Floats series = splat(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f})
    series = series * r + splat(term);
  Words bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;
  Floats two_to_n;
  std::memcpy(&two_to_n, &bits, sizeof(bits));
  return {two_to_n, r + r * r * series};
}

inline Floats exp(Floats x) {
  const Exponential found = exponential(x);
  return found.two_to_n + found.two_to_n * found.rest;
}

// Uses exp(-2 |x|) - 1, so that small values keep all their digits.
inline Floats tanh(Floats x) {
  const Floats size = select(x < splat(0.0f), -x, x);
  const Exponential found = exponential(-2.0f * size);
  const Floats less_one = (found.two_to_n - splat(1.0f)) + found.two_to_n * found.rest;
  const Floats positive = -less_one / (splat(2.0f) + less_one);
  return select(x < splat(0.0f), -positive, positive);
}

}  // namespace jaxspec
