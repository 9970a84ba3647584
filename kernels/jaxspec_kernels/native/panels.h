// Matrices whose outputs lie in panels, as `jaxspec_kernels.panel_matmul` describes.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxspec {

// Outputs of one panel.
constexpr int64_t kPanelWidth = 32;

struct Panels {
  // float32; bfloat16 for rows of float32; bfloat16 for rows that are rounded to it.
  enum Kind { kFloat32, kWidened, kPaired } kind;
  const void* values;  // null where a buffer is no such matrix
  int64_t outputs, features;
};

// The (outputs, features) matrix that a buffer holds.
Panels panels_of(xla::ffi::AnyBuffer buffer, int64_t outputs, int64_t features,
                 bool is_rounded);

// Products of [row, features] with the transposed matrix: [row, outputs].
void multiply(xla::ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
              int64_t num_rows, float* outputs);

}  // namespace jaxspec
