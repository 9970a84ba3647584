// Intel's tiles (AMX): registers of 16 rows of 64 bytes, and products of bfloat16 ones.
//
// A thread that multiplies them holds a `Tiles`, once `ask_for_tiles` has said yes.
#pragma once

#include <cerrno>
#include <cstdint>

// Everything else here needs it; without it there are no tiles to be asked for.
#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && \
    defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)
#define JAXSPEC_HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxspec {

// Why a process may not use tiles: 0 if it may, else an errno. ENOSYS is that of a
// library that was built without them.
//
// Linux keeps another 8 KiB for a thread that uses them, and wants to be asked for it by
// the process. It refuses where a thread handles signals on a stack that is too small
// for that. The answer is that of the first time.
inline int ask_for_tiles() {
#if defined(JAXSPEC_HAS_TILES)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  static const int found = syscall(SYS_arch_prctl, kRequest, kTileData) ? errno : 0;
  return found;
#else
  return ENOSYS;
#endif
}

#if defined(JAXSPEC_HAS_TILES)

// What a tile holds of each matrix: of rows [row, feature] in bfloat16, of the other
// [pair of features, output, 2] in bfloat16, of products [row, output] in float32.
constexpr int64_t kTileRows = 16, kTileFeatures = 32, kTileOutputs = 16;

// All eight tiles at their full size, for as long as it lives: of the thread's own.
//
// The time of a product does not depend on how many rows a tile has. A thread that leaves
// tiles behind makes every switch to another one slower.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } form;
    static_assert(sizeof(form) == 64, "as the instruction reads it");
    for (int tile = 0; tile < 8; ++tile)
      form.row_bytes[tile] = 64, form.rows[tile] = kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(form));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Not the compiler's own, which GCC makes of the text of their arguments: here a tile may
// be a template's number.

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// bytes: From one row in memory to the next.
template <int Tile>
inline void load_tile(const void* from, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(Tile)
               : "memory");
}

template <int Tile>
inline void store_tile(void* to, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes), "i"(Tile)
               : "memory");
}

// Adds products of bfloat16 to sums of float32: of a row and an output, those of even
// features and those of odd ones are added up by themselves, then both to what is there.
// Denormal numbers are taken for zeros.
template <int Sums, int Rows, int Outputs>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows),
               "i"(Outputs));
}

#endif

}  // namespace jaxspec
