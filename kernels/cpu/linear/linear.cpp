// The ops of linear layers: products, packing and the look-up of rows, dispatched by weight type.
#include "linear/groups.h"
#include "linear/driver.h"

namespace headrace {
namespace {

// Arguments of hr_op_pack: source [n, k] (quantised: n rows of GGUF blocks) into weight.data.
struct PackArgs {
  PackedWeight weight;
  const void* source;
  int64_t source_stride;  // elements; bytes for a quantised weight
  void* packed;           // [hr_linear_bytes]
  DType source_dtype;
  GroupSource groups;  // replaces source for a weight with group scales
};

// Arguments of hr_op_embed: out[i] = W[ids[i]], exactly (then rounded to out_dtype), times `scale`.
struct EmbedArgs {
  PackedWeight weight;
  const int32_t* ids;  // [rows], or null for the step's token_ids; already checked against the whole table
  void* out;           // [rows, k]
  int64_t out_stride;  // elements
  DType out_dtype;
  Rows rows;
  int64_t fixed_rows;
  int64_t first_id;  // the id of W's first row; ids of rows that another rank has give zeros
  int64_t known_ids;  // ids from it on are looked up as id 0; 0: there are none
  float scale;
};

}  // namespace

int64_t panel_bytes(const PackedWeight& w) {
  if (is_grouped(w.type)) return grouped_panel_bytes(w);
  return is_quantised(w.type) ? quant_panel_bytes(w.type, w.k) : float_panel_bytes(w.type, w.k);
}

int64_t prepared_row_bytes(const PackedWeight& w) {
  if (is_grouped(w.type)) return grouped_prepared_bytes(w);
  return is_quantised(w.type) ? quant_prepared_bytes(w.type, w.k) : float_prepared_bytes(w.type, w.k);
}

}  // namespace headrace

using namespace headrace;

HR_EXPORT void hr_op_linear(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const LinearArgs*>(raw);
  if (args.site && step.adapters)
    linear_with_deltas(args, step, thread, num_threads);
  else
    args.weight.tiles->linear(args, step, thread, num_threads);
}

HR_EXPORT void hr_op_pack(const void* raw, const Step&, int thread, int num_threads) {
  const auto& args = *static_cast<const PackArgs*>(raw);
  const Range mine = split(panels_of(args.weight), thread, num_threads);
  if (is_grouped(args.weight.type))
    pack_grouped_panels(args.weight, args.groups, args.packed, mine);
  else if (is_quantised(args.weight.type))
    pack_quant_panels(args.weight, args.source, args.source_stride, args.packed, mine);
  else
    pack_float_panels(args.weight, args.source, args.source_stride, args.source_dtype, args.packed, mine);
}

// Needs k floats of per-thread scratch.
HR_EXPORT void hr_op_embed(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const EmbedArgs*>(raw);
  const int64_t rows = step.rows(args.rows, args.fixed_rows), k = args.weight.k;
  const int32_t* ids = args.ids ? args.ids : step.token_ids;
  float* values = reinterpret_cast<float*>(step.thread_scratch(thread));
  const Range mine = split(rows, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    if (ids[row] == kGivenRow) continue;
    const bool is_unknown = args.known_ids > 0 && ids[row] >= args.known_ids;
    const int64_t id = (is_unknown ? 0 : ids[row]) - args.first_id;
    if (id < 0 || id >= args.weight.n)
      std::memset(values, 0, static_cast<size_t>(k) * sizeof(float));
    else if (is_grouped(args.weight.type))
      unpack_grouped_row(args.weight, id, values);
    else if (is_quantised(args.weight.type))
      unpack_quant_row(args.weight, id, values);
    else
      unpack_float_row(args.weight, id, values);
    const int64_t at = row * args.out_stride, whole = k / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes)
      store_vector(args.out, at + i, args.out_dtype, load_floats(values + i) * args.scale);
    for (int64_t i = whole; i < k; ++i) store_one(args.out, at + i, args.out_dtype, values[i] * args.scale);
  }
}

// Bytes of a weight in packed form; 0 for a k that the type does not support.
HR_EXPORT int64_t hr_linear_bytes(const PackedWeight* weight) {
  return panels_of(*weight) * panel_bytes(*weight);
}

// The scratch of hr_op_linear for up to max_rows rows, for all types of x and out.
HR_EXPORT void hr_linear_scratch(const PackedWeight* weight, int64_t max_rows, ScratchNeed* need) {
  const int64_t row_bytes = prepared_row_bytes(*weight);
  const int64_t block_rows = max_rows < kMaxBlockRows ? max_rows : kMaxBlockRows;
  need->shared_bytes = max_rows > kPrepareAloneRows ? max_rows * row_bytes : 0;
  need->per_thread_bytes = kPrepareAloneRows * row_bytes + block_rows * weight->fan * kPanelRows * 4;
}

// For a test that compares the ctypes mirrors with these structures.
HR_EXPORT int64_t hr_sizeof_linear_args() { return sizeof(LinearArgs); }
HR_EXPORT int64_t hr_sizeof_embed_args() { return sizeof(EmbedArgs); }
HR_EXPORT int64_t hr_sizeof_pack_args() { return sizeof(PackArgs); }
HR_EXPORT int64_t hr_sizeof_step() { return sizeof(Step); }
