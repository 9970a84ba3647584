// Products of tiles of bfloat16 (AMX): a processor's eight tile registers.
//
// Registers 0 to 3 hold sums [row, output] in float32, the next ones rows [row, feature],
// and the others the matrix [pair of features, output, 2]. The instructions are in
// assembler, because compilers' own functions do not say that they access memory.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define JAXSPEC_HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxspec {

constexpr int kTileRows = 16, kTileOutputs = 16, kTileFeatures = 32;
constexpr int kTileBytes = 1024;

#if defined(JAXSPEC_HAS_TILES)

// Whether the system lets this process use tiles; it asks once.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_allowed =
      syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_allowed;
}

// Makes this thread treat denormal numbers as zeros, as tiles do, while it lives.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  const unsigned before_;
};

// Configures this thread's tiles until it is destroyed: the sums and `count` tiles of
// rows have `num_rows` rows.
class Tiles {
 public:
  Tiles(int num_rows, int count) {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = static_cast<uint8_t>(tile < 4 + count ? num_rows : kTileRows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int Tile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

template <int Tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile)
               : "memory");
}

template <int Tile>
inline void store_tile(float* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile)
               : "memory");
}

// Sums += Rows * Matrix.
template <int Sums, int Rows, int Matrix>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows),
               "i"(Matrix));
}

#endif

}  // namespace jaxspec
