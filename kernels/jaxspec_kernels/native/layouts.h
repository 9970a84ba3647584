// Layouts of the values in a panel, and their conversion in registers.
//
// A panel stores the values of its outputs in steps. A step holds kFeatures consecutive
// features of every output, as kValues values per output. From a step, `value` returns
// the number (before scaling) of one output and feature; `floats` returns those of
// kLanes outputs; `pairs`, for AVX-512 BF16, returns those of two features as bfloat16,
// the first feature in the lower half. All conversions are exact.
#pragma once

#include <cstdint>
#include <cstring>

#include "panels.h"
#include "vectors.h"

namespace jaxspec {

struct Float32Layout {
  typedef float Value;
  static constexpr int kFeatures = 1, kValues = 1;
  static constexpr bool kIsScaled = false;

  static float value(const Value* step, int64_t output, int64_t) { return step[output]; }
  static Floats floats(const Value* step, int vector, int) {
    return load(step + vector * kLanes);
  }
};

// Pairs of features: [output, 2].
struct Bfloat16Layout {
  typedef Bfloat16 Value;
  static constexpr int kFeatures = 2, kValues = 2;
  static constexpr bool kIsScaled = false;

  static float value(const Value* step, int64_t output, int64_t feature) {
    return widen(step[2 * output + feature]);
  }
  static Floats floats(const Value* step, int vector, int feature) {
    Words pairs;
    std::memcpy(&pairs, step + 2 * vector * kLanes, sizeof(pairs));
    return (Floats)(feature ? pairs & 0xffff0000u : pairs << 16);
  }
#if defined(__AVX512BF16__)
  static __m512i pairs(const Value* step, int vector, int) {
    return _mm512_loadu_si512(step + 2 * vector * kLanes);
  }
#endif
};

// 8-bit integers: [2, output].
struct Int8Layout {
  typedef int8_t Value;
  static constexpr int kFeatures = 2, kValues = 2;
  static constexpr bool kIsScaled = true;

  static float value(const Value* step, int64_t output, int64_t feature) {
    return step[feature * kPanelWidth + output];
  }
  static Floats floats(const Value* step, int vector, int feature) {
    return to_floats(load_bytes(step + feature * kPanelWidth + vector * kLanes));
  }
#if defined(__AVX512BF16__)
  static __m512i pairs(const Value* step, int vector, int) {
    const __m512i even = (__m512i)floats(step, vector, 0);
    return _mm512_or_si512(_mm512_srli_epi32(even, 16),
                           (__m512i)floats(step, vector, 1));
  }
#endif
};

// 8-bit floats, e4m3: sign, four bits of an exponent with bias 7, three of a fraction;
// [2, output]. Weights have no NaN.
struct Float8Layout {
  typedef uint8_t Value;
  static constexpr int kFeatures = 2, kValues = 2;
  static constexpr bool kIsScaled = true;

  static float value(const Value* step, int64_t output, int64_t feature) {
    Value lanes[kLanes] = {step[feature * kPanelWidth + output]};
    return of_float8(load_bytes(lanes))[0];
  }
  static Floats floats(const Value* step, int vector, int feature) {
    return of_float8(load_bytes(step + feature * kPanelWidth + vector * kLanes));
  }
#if defined(__AVX512BF16__)
  static __m512i pairs(const Value* step, int vector, int) {
    typedef uint16_t Pairs __attribute__((vector_size(64)));
    // bfloat16 of 0 to 7 times 2^-9, at the indices that `small` reads: it uses the lowest
    // five bits.
    constexpr Pairs kSmall = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    auto bytes = [&](int feature) {
      return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(
          step + feature * kPanelWidth + vector * kLanes)));
    };
    const Pairs bits = (Pairs)_mm512_or_si512(bytes(0), _mm512_slli_epi32(bytes(1), 16));
    const Pairs size = bits & 0x7f;
    const __m512i normal = (__m512i)((size << 4) + (120 << 7));
    const __m512i small = _mm512_permutexvar_epi16((__m512i)bits, (__m512i)kSmall);
    const __m512i found = _mm512_mask_blend_epi16(
        _mm512_cmplt_epu16_mask((__m512i)size, _mm512_set1_epi16(8)), normal, small);
    return (__m512i)((Pairs)found | (Pairs)((bits & 0x80) << 8));
  }
#endif
};

// Eight 4-bit integers, one per feature, in a uint32: even features in the lower half,
// odd features in the upper half, each in ascending order from the lowest bits. They are
// -8 to 7, or 0 to 15.
template <bool IsSigned>
struct FourBitLayout {
  typedef uint32_t Value;
  static constexpr int kFeatures = 8, kValues = 1;
  static constexpr bool kIsScaled = true;

  static constexpr int shift(int feature) {
    return 4 * (feature / 2) + 16 * (feature % 2);
  }
  static float value(const Value* step, int64_t output, int64_t feature) {
    const uint32_t bits = step[output] >> shift(static_cast<int>(feature)) << 28;
    return static_cast<float>(IsSigned ? static_cast<int32_t>(bits) >> 28
                                       : static_cast<int32_t>(bits >> 28));
  }
  static Floats floats(const Value* step, int vector, int feature) {
    Ints bits;
    std::memcpy(&bits, step + vector * kLanes, sizeof(bits));
#if defined(__AVX512F__)
    const __m512 numbers =
        IsSigned
            ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
            : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // The look-up ignores all but the lowest four bits.
    return (Floats)_mm512_permutexvar_ps((__m512i)(bits >> shift(feature)), numbers);
#else
    if (!IsSigned) return to_floats(bits >> shift(feature) & 15);
    return to_floats((bits << (28 - shift(feature))) >> 28);
#endif
  }
#if defined(__AVX512BF16__)
  static __m512i pairs(const Value* step, int vector, int pair) {
    typedef uint16_t Pairs __attribute__((vector_size(64)));
    // bfloat16 of 0 to 7 and -8 to -1, or of 0 to 15, twice: the look-up uses the lowest
    // five bits.
    constexpr Pairs kSigned = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    constexpr Pairs kUnsigned = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    Pairs bits;
    std::memcpy(&bits, step + vector * kLanes, sizeof(bits));
    return _mm512_permutexvar_epi16((__m512i)(bits >> (4 * pair)),
                                    (__m512i)(IsSigned ? kSigned : kUnsigned));
  }
#endif
};

typedef FourBitLayout<true> Int4Layout;
typedef FourBitLayout<false> Uint4Layout;

}  // namespace jaxspec
