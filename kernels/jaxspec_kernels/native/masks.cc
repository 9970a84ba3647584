// Token masks that Python computes while a program runs.
//
// XLA cannot keep a program with jax's own callbacks beyond its process: they are
// addresses. This operation has a name and finds the function in its own process.
#include <atomic>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

using Numbers = ffi::Buffer<ffi::S32, 1>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Masks = ffi::Buffer<ffi::U32, 3>;

// Sizes are rows, newest tokens, drafts, masks of a row, words of a mask. Returns 0, or
// another number if it failed.
using Function = int32_t (*)(const int64_t* sizes, const int32_t* grammar_id,
                             const int32_t* num_tokens, const int32_t* newest,
                             const int32_t* drafts, const int32_t* before,
                             uint32_t* masks);

std::atomic<Function> function{nullptr};

ffi::Error TokenMasks(Numbers grammar_id, Numbers num_tokens, Table newest,
                      Table drafts, Numbers before, ffi::Result<Masks> masks) {
  const int64_t rows = grammar_id.dimensions()[0];
  const int64_t sizes[] = {rows, newest.dimensions()[1], drafts.dimensions()[1],
                           before.dimensions()[0], masks->dimensions()[2]};
  if (num_tokens.dimensions()[0] != rows || newest.dimensions()[0] != rows ||
      drafts.dimensions()[0] != rows || masks->dimensions()[0] != rows ||
      masks->dimensions()[1] != sizes[3])
    return ffi::Error::InvalidArgument("token masks: shapes do not fit");
  const Function found = function.load();
  if (found == nullptr)
    return ffi::Error::Internal("token masks: no function computes them");
  if (found(sizes, grammar_id.typed_data(), num_tokens.typed_data(),
            newest.typed_data(), drafts.typed_data(), before.typed_data(),
            masks->typed_data()) != 0)
    return ffi::Error::Internal("token masks: the function failed, as the log says");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

extern "C" void jaxspec_set_mask_function(jaxspec::Function function) {
  jaxspec::function.store(function);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_token_masks, jaxspec::TokenMasks,
                              xla::ffi::Ffi::Bind()
                                  .Arg<jaxspec::Numbers>()
                                  .Arg<jaxspec::Numbers>()
                                  .Arg<jaxspec::Table>()
                                  .Arg<jaxspec::Table>()
                                  .Arg<jaxspec::Numbers>()
                                  .Ret<jaxspec::Masks>());
