// The additions of adapters to linear layers: see deltas.h.
#include "runtime/amx.h"
#include "linear/deltas.h"

#include "experts/driver.h"

namespace headrace {
namespace {

constexpr int kMostTileRows = 2 * kBlockRows;
// Of a panel of B; the hardware fetches the rest of a longer one.
constexpr int64_t kMostFetched = 4096;
constexpr int kHalfRows = kPanelRows / 2;  // rows of A in a panel: ranks are small, and a panel's padding is read too
constexpr int64_t kBlockBytes = 256 * 1024;  // of a panel of A that several tiles read
constexpr int64_t kReadRows = 8;  // whose products with a panel take as long as reading it from memory
constexpr int64_t kFactorValues = 128;  // of each row of a panel, that are packed together: whole vectors
constexpr int64_t kPanelsAhead = 4;  // of the list of panels: what it points to is requested without waiting

DType type_of_y(const DeltaSite& site) {
  LinearArgs pair = {};
  pair.weight.k = 2;
  pair.x_dtype = DType::kBF16;
  return site.tiles->usable(pair) ? DType::kBF16 : DType::kF32;
}

// What a slot has for a weight, or null.
const Delta* delta_of(const DeltaSite& site, int32_t slot, int64_t weight) {
  const Delta* deltas = site.slots[slot];
  return deltas && deltas[weight].panels ? deltas + weight : nullptr;
}

int64_t bytes_of_y(const DeltaSite& site, const RowAdapters& rows, int64_t k, DType type) {
  PackedWeight own = {};
  own.type = site.type;
  own.k = k;
  int64_t most = 0;
  for (int64_t i = 0; i < rows.num_slots; ++i) {
    const Delta* delta = delta_of(site, rows.slots[i], 0);
    if (!delta) continue;
    const int64_t bytes = delta->replaces != 0 ? prepared_row_bytes(own) : delta->width * size_of(type);
    most = bytes > most ? bytes : most;
  }
  return whole_lines(most);
}

// What tiles of the site's type need to know of x, whose rows have k values.
LinearArgs input_of(const LinearArgs& args, const DeltaSite& site, int64_t k) {
  LinearArgs own = {};
  own.weight.k = k;
  own.weight.type = site.type;
  own.weight.fan = 1;
  own.x = args.x;
  own.x_stride = args.x_stride;
  own.x_thread_stride = args.x_thread_stride;
  own.x_dtype = args.x_dtype;
  return own;
}

// The rows of x of pairs [begin, end) one after another, as the site's tiles read them.
Prepared gather_pairs(const LinearArgs& own, const DeltaSite& site, const int32_t* rows, int64_t count, char* to,
                      int thread) {
  const int64_t row_bytes = own.x_stride * size_of(own.x_dtype);
  const bool usable = site.tiles->usable(own);
  if (usable && rows[count - 1] - rows[0] == count - 1) return {row_of_x(own, thread, rows[0]), row_bytes};
  const int64_t bytes = own.weight.k * size_of(own.x_dtype);
  const int64_t pitch = usable ? whole_lines(bytes) : prepared_row_bytes(own.weight);
  for (int64_t i = 0; i < count; ++i) {
    if (usable)
      std::memcpy(to + i * pitch, row_of_x(own, thread, rows[i]), static_cast<size_t>(bytes));
    else
      site.tiles->prepare(own, row_of_x(own, thread, rows[i]), to + i * pitch);
  }
  return {to, pitch};
}

// The products of rows with the panels of A of adapters, each kHalfRows rows of A.
struct Shrink {
  const DeltaSite* site;
  const RowAdapters* rows;
  LinearArgs own;  // as tiles of the site's type read x
  int64_t y_bytes;
  DType y_type;
  float* sums;  // [rows of a block, kHalfRows]

  int64_t k_bytes() const { return kHalfRows * (site->type == WeightType::kF32 ? 4 : 2); }
  int64_t panel_bytes() const { return panel_k() * k_bytes(); }
  int64_t panel_k() const { return site->type == WeightType::kBF16 ? (own.weight.k + 1) / 2 * 2 : own.weight.k; }

  // Writes a panel's columns of y for the pairs [pair, pair + count): scale * x A^T. next: what this thread reads next.
  void panel(const Delta& delta, const Prepared& x, int64_t panel, int64_t pair, int64_t count,
             const char* next) const {
    const int64_t k = own.weight.k, most = site->tiles->max_rows, tiles = (count + most - 1) / most;
    const char* data = delta.a + panel * panel_bytes();
    // One tile prefetches the next panel while it reads the end of this one.
    const int64_t ahead_k = kAheadBytes / k_bytes(), early = k > ahead_k ? (k - ahead_k) / 2 * 2 : k;
    const int64_t block_k = tiles == 1 ? early : kBlockBytes / k_bytes();
    for (int64_t first = 0; first < k;) {
      const int64_t size = first + block_k < k && first < early ? block_k : k - first;
      const char* block = data + first * k_bytes();
      const bool is_last = first + size == k;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const Range part = split(count, static_cast<int>(tile), static_cast<int>(tiles));
        Ahead ahead = ahead_of(block, size * k_bytes(), size * k_bytes(), tile, tiles);
        if (tiles == 1 && is_last) ahead.from = next;
        site->tiles->half(static_cast<int>(part.end - part.begin), x.base + part.begin * x.row_bytes + first * x_step(),
                          x.row_bytes, block, size, sums + part.begin * kHalfRows, kHalfRows, first > 0, ahead);
      }
      first += size;
    }
    for (int64_t row = 0; row < count; ++row)
      for (int i = 0; i < kHalfRows; i += kLanes)
        store_vector(site->y + (pair + row) * y_bytes, panel * kHalfRows + i, y_type,
                     load_floats(sums + row * kHalfRows + i) * rows->scales[pair + row]);
  }

  // Bytes of a value of a prepared row.
  int64_t x_step() const { return size_of(y_type); }
};

// A block of a slot's pairs and a panel of its A.
struct ShrinkTask {
  const Delta* delta;
  int64_t pair, count, panel;
};

// The tasks of a step in order: each(task).
template <class Each>
void for_each_task(const Shrink& shrink, int64_t pitch, int num_threads, Each each) {
  const RowAdapters& rows = *shrink.rows;
  for (int64_t i = 0; i < rows.num_slots; ++i) {
    const Delta* delta = delta_of(*shrink.site, rows.slots[i], 0);
    if (!delta) continue;
    const int64_t begin = rows.starts[i], count = rows.starts[i + 1] - begin;
    const int64_t panels = delta->replaces != 0 ? 1 : (delta->width + kHalfRows - 1) / kHalfRows;
    int64_t block_rows = rows_per_block(count, pitch, panels, num_threads, shrink.site->tiles->max_rows);
    const int64_t most = gathered_rows(pitch);
    if (block_rows > most) block_rows = most;
    for (int64_t first = 0; first < count; first += block_rows)
      for (int64_t panel = 0; panel < panels; ++panel)
        each(ShrinkTask{delta, begin + first, count - first < block_rows ? count - first : block_rows, panel});
  }
}

// y = scale * x A^T: this thread's share of the tasks, which is what lies together in memory.
void shrink(const LinearArgs& args, const DeltaRun& run, const Step& step, int thread, int num_threads) {
  const DeltaSite& site = *run.site;
  const RowAdapters& rows = *run.rows;
  const LinearArgs own = input_of(args, site, args.weight.k);
  const int64_t pitch = whole_lines(prepared_row_bytes(own.weight));
  char* gathered = step.thread_scratch(thread);
  const int64_t least = kLeastGathered * pitch;
  float* sums = reinterpret_cast<float*>(gathered + (least > kActivationBlockBytes ? least : kActivationBlockBytes));
  const Shrink shrink = {&site, &rows, own, run.y_bytes, run.y_type, sums};
  // A panel of few rows costs as much as of kReadRows, since it is read from memory.
  const auto work_of = [](const ShrinkTask& task) { return task.count < kReadRows ? kReadRows : task.count; };
  int64_t total = 0, before = 0, gathered_pair = -1;
  for_each_task(shrink, pitch, num_threads, [&](const ShrinkTask& task) { total += work_of(task); });
  Prepared x = {};
  const auto compute = [&](const ShrinkTask& task, const char* next) {
    const int32_t* pairs = rows.rows + task.pair;
    if (task.delta->replaces != 0) {
      for (int64_t row = 0; row < task.count; ++row)
        site.tiles->prepare(own, row_of_x(own, thread, pairs[row]), site.y + (task.pair + row) * run.y_bytes);
      return;
    }
    if (task.pair != gathered_pair) x = gather_pairs(own, site, pairs, task.count, gathered, thread);
    gathered_pair = task.pair;
    shrink.panel(*task.delta, x, task.panel, task.pair, task.count, next);
  };
  ShrinkTask last = {};
  for_each_task(shrink, pitch, num_threads, [&](const ShrinkTask& task) {
    const bool is_mine = before * num_threads / total == thread;
    before += work_of(task);
    if (!is_mine) return;
    if (last.delta) compute(last, task.delta->a + task.panel * shrink.panel_bytes());
    last = task;
  });
  if (last.delta) compute(last, last.delta->panels[0].data);
}

// The sums of rows whose product as a whole is changed: see Delta.magnitude and Delta.replaces. base: x W^T.
void change_whole(const Delta& delta, const float* magnitude, float scale, const float* base, const float* added,
                  float* sums) {
  for (int i = 0; i < kPanelRows; i += kLanes) {
    const Floats before = load_floats(base + i), now = load_floats(added + i);
    Floats value = load_floats(sums + i);
    if (delta.replaces != 0)
      value = value + (now - before) * scale;
    else
      value = value + before * ((load_floats(magnitude + i) - 1.0f) * scale) + load_floats(magnitude + i) * now;
    store_floats(sums + i, value);
  }
}

// Adds to the sums of `count` rows in one panel. pair: of the first row; the others' follow.
void expand_panel(const DeltaRun& run, const Delta& delta, int64_t panel, int32_t pair, int count, const float* base,
                  float* sums, int64_t sums_stride) {
  const DeltaPanel& part = delta.panels[panel];
  const int64_t bytes = run.y_bytes;
  const char* y = run.site->y + pair * bytes + part.begin * size_of(run.y_type);
  const int64_t lines = panel * kPanelRows;
  const bool whole = delta.magnitude || delta.replaces != 0;
  alignas(64) float added[kMostTileRows * kPanelRows];
  if (whole) std::memset(added, 0, sizeof(added));
  if (part.count > 0) {
    const int most = run.site->tiles->max_rows;
    for (int row = 0; row < count; row += most) {
      const int size = count - row < most ? count - row : most;
      float* to = whole ? added + row * kPanelRows : sums + row * sums_stride;
      run.site->tiles->tile(size, y + row * bytes, bytes, part.data, part.count, to, whole ? kPanelRows : sums_stride,
                            !whole, Ahead{part.data, 0});
    }
  }
  for (int row = 0; row < count; ++row) {
    const float scale = run.rows->scales[pair + row];
    float* to = sums + row * sums_stride;
    if (whole)
      change_whole(delta, delta.magnitude + lines, scale, base + row * sums_stride, added + row * kPanelRows, to);
    if (!delta.bias) continue;
    for (int i = 0; i < kPanelRows; i += kLanes)
      store_floats(to + i, load_floats(to + i) + load_floats(delta.bias + lines + i) * scale);
  }
}

// DeltaRun.add: extends the sums of a tile, [num_rows, fan, kPanelRows].
void expand(const DeltaRun& run, float* sums, int64_t sums_stride, int64_t first_row, int num_rows, int64_t unit) {
  const RowAdapters& rows = *run.rows;
  alignas(64) float before[kMostTileRows * 2 * kPanelRows];
  const float* base = sums;
  if (rows.most_used > 1) {  // each adapter changes the product with the model's own weight
    std::memcpy(before, sums, static_cast<size_t>(num_rows * sums_stride) * sizeof(float));
    base = before;
  }
  for (int64_t use = 0; use < rows.most_used; ++use) {
    const int32_t* pairs = rows.pair_of + use * rows.num_rows + first_row;
    for (int row = 0; row < num_rows;) {
      const int32_t pair = pairs[row];
      int count = 1;
      if (pair >= 0) {
        while (row + count < num_rows && pairs[row + count] == pair + count &&
               rows.slot_of[pair + count] == rows.slot_of[pair])
          ++count;
        const Delta* delta = delta_of(*run.site, rows.slot_of[pair], run.weight);
        for (int64_t f = 0; delta && f < run.fan; ++f)
          expand_panel(run, *delta, unit * run.fan + f, pair, count, base + row * sums_stride + f * kPanelRows,
                       sums + row * sums_stride + f * kPanelRows, sums_stride);
      }
      row += count;
    }
  }
}

// DeltaRun.tails
bool tails(const DeltaRun& run, int64_t first_row, int num_rows, int64_t unit, DeltaTail* tails) {
  const RowAdapters& rows = *run.rows;
  if (rows.most_used > 1) return false;
  const int32_t* pairs = rows.pair_of + first_row;
  const int32_t pair = pairs[0];
  const bool has_any = pair >= 0;
  for (int row = 1; row < num_rows; ++row) {
    if (has_any ? pairs[row] != pair + row || rows.slot_of[pairs[row]] != rows.slot_of[pair] : pairs[row] >= 0)
      return false;
  }
  const Delta* delta = has_any ? delta_of(*run.site, rows.slot_of[pair], run.weight) : nullptr;
  if (delta && (delta->bias || delta->magnitude || delta->replaces != 0)) return false;
  for (int64_t f = 0; f < run.fan; ++f) {
    tails[f] = {};
    if (!delta) continue;
    const DeltaPanel& part = delta->panels[unit * run.fan + f];
    const char* y = run.site->y + pair * run.y_bytes + part.begin * size_of(run.y_type);
    tails[f] = {y, run.y_bytes, part.data, part.count};
  }
  return true;
}

// DeltaRun.fetch
void fetch(const DeltaRun& run, int64_t unit, int64_t part, int64_t parts) {
  const int64_t panels = run.rows->num_slots * run.fan;
  const Range mine = split(panels, static_cast<int>(part), static_cast<int>(parts));
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const Delta* delta = delta_of(*run.site, run.rows->slots[i / run.fan], run.weight);
    if (!delta) continue;
    const DeltaPanel* panel = delta->panels + unit * run.fan + i % run.fan;
    __builtin_prefetch(panel + kPanelsAhead);
    const int64_t bytes = panel->count * kPanelRows * (run.site->type == WeightType::kF32 ? 4 : 2);
    for (int64_t at = 0; at < bytes && at < kMostFetched; at += 64) __builtin_prefetch(panel->data + at, 0, 2);
  }
}

int64_t lines_of(int64_t values) { return whole_lines(4 * values); }

// StackDeltas.begin
const DeltaRun* begin_stack(StackDeltas& deltas, const StackRun& run, int64_t expert, int64_t begin, int64_t end,
                            int thread) {
  const DeltaSite& site = *deltas.site;
  const RowAdapters& rows = *deltas.rows;
  const int64_t count = end - begin, pairs = rows.most_used * count, room = lines_of(rows.most_used * kStackRows);
  auto* pair_of = reinterpret_cast<int32_t*>(deltas.scratch);
  auto* slot_of = reinterpret_cast<int32_t*>(deltas.scratch + room);
  auto* scales = reinterpret_cast<float*>(deltas.scratch + 2 * room);
  auto* from = reinterpret_cast<int32_t*>(deltas.scratch + 3 * room);
  auto* sums = reinterpret_cast<float*>(deltas.scratch + 4 * room);
  char* gathered = deltas.scratch + 4 * room + kStackRows * kPanelRows * 4;
  const DType type = type_of_y(site);
  int64_t y_bytes = 0;
  for (int64_t at = 0; at < pairs; ++at) {
    const int32_t pair = rows.pair_of[at / count * rows.num_rows + run.pairs.rows[begin + at % count]];
    const Delta* delta = pair < 0 ? nullptr : delta_of(site, rows.slot_of[pair], expert);
    pair_of[at] = delta ? static_cast<int32_t>(at) : -1;
    slot_of[at] = delta ? rows.slot_of[pair] : -1;
    scales[at] = delta ? rows.scales[pair] : 0.0f;
    if (delta && delta->width * size_of(type) > y_bytes) y_bytes = delta->width * size_of(type);
  }
  if (y_bytes == 0) return nullptr;
  for (int64_t i = 0; i < count; ++i)
    from[i] = run.gathers ? run.pairs.rows[begin + i] : static_cast<int32_t>(begin + i - run.pass.begin);
  const LinearArgs own = input_of(run.linear, site, run.experts[0].k);
  y_bytes = whole_lines(y_bytes);
  deltas.own = site;
  deltas.own.y = gathered + kStackRows * whole_lines(prepared_row_bytes(own.weight));
  deltas.paired = {nullptr, rows.slots, nullptr, slot_of, scales, pair_of, rows.num_slots, rows.most_used, count};
  deltas.run = {expand, tails, fetch, &deltas.own, &deltas.paired, y_bytes, run.experts[0].fan, expert, type};
  const Shrink shrink = {&deltas.own, &deltas.paired, own, y_bytes, type, sums};
  for (int64_t at = 0; at < pairs;) {
    int64_t size = 1;
    if (pair_of[at] >= 0) {
      while ((at + size) % count != 0 && slot_of[at + size] == slot_of[at]) ++size;
      const Delta& delta = *delta_of(site, slot_of[at], expert);
      const Prepared x = gather_pairs(own, site, from + at % count, size, gathered, thread);
      for (int64_t panel = 0; panel * kHalfRows < delta.width; ++panel)
        shrink.panel(delta, x, panel, at, size, delta.panels[0].data);
    }
    at += size;
  }
  return &deltas.run;
}

}  // namespace

StackDeltas stack_deltas(const DeltaSite* site, const RowAdapters* rows, char* scratch) {
  StackDeltas deltas = {};
  deltas.begin = begin_stack;
  deltas.site = site;
  deltas.rows = rows;
  deltas.scratch = scratch;
  return deltas;
}

int64_t stack_delta_bytes(int64_t most_used, int64_t width, int64_t k) {
  return 4 * lines_of(most_used * kStackRows) +
         kStackRows * (kPanelRows * 4 + lines_of(k + 16) + most_used * lines_of(width));
}

void linear_with_deltas(const LinearArgs& args, const Step& step, int thread, int num_threads) {
  const DeltaSite& site = *args.site;
  const RowAdapters& rows = step.adapters[args.rows == Rows::kLogits ? 1 : 0];
  const DType type = type_of_y(site);
  const int64_t y_bytes = bytes_of_y(site, rows, args.weight.k, type);
  const DeltaRun run = {expand, tails, fetch, &site, &rows, y_bytes, args.weight.fan, 0, type};
  LinearArgs own = args;
  if (run.y_bytes > 0) {
    own.deltas = &run;
    shrink(args, run, step, thread, num_threads);
  }
  // Also in a layer that no adapter of the step changes, since two layers' y alternate.
  step.team->barrier();
  args.weight.tiles->linear(own, step, thread, num_threads);
}

}  // namespace headrace

using namespace headrace;

namespace {

// Values [first, first + count) of a row of factors in the packed type: in place, or converted into `values`.
const char* values_of(const FactorRows& rows, int64_t row, int64_t first, int64_t count, char* values) {
  const int64_t vectors_end = rows.k / kLanes * kLanes - first;  // vectors are read within the row
  const char* from = static_cast<const char*>(rows.from) + (row * rows.stride + first) * size_of(rows.from_type);
  if (rows.from_type == rows.type && rows.scale == 1.0f) return from;
  for (int64_t i = 0; i < count; i += kLanes) {
    if (i < vectors_end) {
      store_vector(values, i, rows.type, load_vector(from, i, rows.from_type) * rows.scale);
      continue;
    }
    for (int64_t j = i; j < count; ++j)
      store_one(values, j, rows.type, load_one(from, j, rows.from_type) * rows.scale);
  }
  return values;
}

// Writes `count` values of each row of a panel, value after value; null: no row.
template <class Value>
void interleave(const char* const* from, int panel_rows, int64_t count, char* to) {
  auto* places = reinterpret_cast<Value*>(to);
  for (int64_t i = 0; i < count; ++i, places += panel_rows)
    for (int place = 0; place < panel_rows; ++place)
      if (from[place]) std::memcpy(places + place, from[place] + i * sizeof(Value), sizeof(Value));
}

// As panels of float.h.
void pack_panel(const FactorRows& rows, int64_t panel) {
  const int step = rows.type == DType::kBF16 ? 2 : 1;  // values of a row that lie together
  const int64_t padded = (rows.k + step - 1) / step * step;
  char* to = rows.to + panel * rows.panel_rows * padded * size_of(rows.type);
  alignas(64) char values[kPanelRows][kFactorValues * 4];
  const char* from[kPanelRows];
  for (int64_t first = 0; first < rows.k; first += kFactorValues) {
    const int64_t count = rows.k - first < kFactorValues ? rows.k - first : kFactorValues;
    for (int place = 0; place < rows.panel_rows; ++place) {
      const int64_t at = panel * rows.panel_rows + place;
      const int64_t row = rows.order ? rows.order[at] : (at < rows.num_rows ? at : -1);
      from[place] = row < 0 ? nullptr : values_of(rows, row, first, count, values[place]);
    }
    char* block = to + first * rows.panel_rows * size_of(rows.type);
    if (step == 1 && rows.type == DType::kF16) {
      interleave<uint16_t>(from, rows.panel_rows, count, block);
      continue;
    }
    interleave<uint32_t>(from, rows.panel_rows, count / step, block);
    for (int place = 0; count % step != 0 && place < rows.panel_rows; ++place)  // the last one, beside a zero
      if (from[place])
        std::memcpy(block + (count / step * rows.panel_rows + place) * 4, from[place] + (count - 1) * 2, 2);
  }
}

}  // namespace

// Called from any thread, beside steps.
HR_EXPORT void hr_pack_factors(const FactorRows* all, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t panel = 0; panel * all[i].panel_rows < all[i].num_places; ++panel) pack_panel(all[i], panel);
}

HR_EXPORT void hr_op_embed_deltas(const void* raw, const Step& step, int thread, int num_threads) {
  if (!step.adapters) return;
  const auto& args = *static_cast<const EmbedDeltasArgs*>(raw);
  const RowAdapters& rows = step.adapters[0];
  float* base = reinterpret_cast<float*>(step.thread_scratch(thread));
  float* sums = base + args.width;
  const Range mine = split(step.num_tokens, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int64_t id = step.token_ids[row], at = row * args.out_stride;
    bool is_read = false;
    for (int64_t use = 0; use < rows.most_used && id != kGivenRow; ++use) {
      const int32_t pair = rows.pair_of[use * rows.num_rows + row];
      const EmbedDelta* delta = pair < 0 ? nullptr : args.slots[rows.slot_of[pair]];
      if (!delta) continue;
      if (!is_read)
        for (int64_t i = 0; i < args.width; ++i) base[i] = sums[i] = load_one(args.out, at + i, args.out_dtype);
      is_read = true;
      const float scale = rows.scales[pair];
      for (int64_t i = 0; delta->rows && i < args.width; ++i)
        sums[i] += scale * (args.scale * delta->rows[id * args.width + i] - base[i]);
      for (int64_t j = 0; j < delta->rank; ++j) {
        const float factor = scale * args.scale * delta->a[id * delta->rank + j];
        for (int64_t i = 0; i < args.width; ++i) sums[i] += factor * delta->b[j * args.width + i];
      }
    }
    for (int64_t i = 0; is_read && i < args.width; ++i) store_one(args.out, at + i, args.out_dtype, sums[i]);
  }
}
