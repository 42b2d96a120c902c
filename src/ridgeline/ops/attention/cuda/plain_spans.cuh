// The plan of plain attention's backward pass in one kernel (no relative term, no dropout; windows of any length).
//
// A span is four neighbouring blocks of 64 keys of one key head, two for each of two warpgroups that compute. Tiles of 64
// queries, with the gradients of their outputs, stream by from the span's first block on, of one head that uses the keys
// after the other. Squares have keys as rows, so that P and dS are operands in registers of dV's and dK's products; dS goes to
// shared memory too, where a third warpgroup multiplies those of the whole span with its keys: the span's share of the tile's
// dQ. Scores are computed once, and a square takes five products.
//
// A fourth warpgroup starts all copies and computes the rows' statistics. It needs no barriers for places of tiles that have
// become free: dS of a tile from everybody says that everybody is done with the tile before. Those of keys are free once dQ's
// warpgroup is done with their span.
//
// A thread block takes all spans of its heads, or where these are few a part of them, one span after the other. What they
// add up to of dQ lies in fp32 in a place of the thread block's own, and each of its threads meets only what it wrote. The
// parts of a head are added by another kernel, which starts while this one runs, on processors that this one has no use for: a
// note says that a part's share of some tiles is there.
#pragma once
#include "tiles.cuh"

namespace rl {

static_assert(D == 32);
constexpr int GROUPS = 2, KEYS = 2, SPAN = GROUPS * KEYS;  // warpgroups that compute, blocks of one, blocks of a span
constexpr int STAGES = RING_STAGES, SQUARES = SQUARE_STAGES, STEP = 32, PAIR = 2 * TILE;
constexpr int STATISTICS = 4;  // tiles whose statistics are held; who computes is at most SQUARES tiles ahead
constexpr int THREADS = 128 * (GROUPS + 2);
static_assert((STAGES & (STAGES - 1)) == 0 && SQUARES < STATISTICS);  // places and phases are cheap
constexpr int MANY_REGISTERS = 200, FEW_REGISTERS = 56;  // of a thread that computes, and of another one

RL_HD constexpr u32 units(int bytes) { return bytes >> 4; }  // of operand addresses

struct Arguments {
  const TensorMap *q, *k, *v, *d_o;
  const u16* o;
  const float* lse;
  u16 *dq, *dk, *dv;
  float *dq_sums, *dk_parts, *dv_parts, *column_sums;
  u32* notes;
  // parts: of the heads that share keys; key_parts: of a head's spans.
  int T, blocks, heads, heads_per_part, parts, key_parts, units, o_pitch, q_pitch, kv_pitch, sum_rows;
  float scale;
  int head_parts;                               // of all key heads
  u32 by_key_parts, by_head_parts, by_parts;    // inverses, see `quotient`
};

// The heads and spans that a thread block takes at a time.
struct Unit {
  int part, key_part, batch, first_head, group;  // part: its number among those of all samples and key heads
  RL_D Unit(const Arguments& a, int number) {
    part = quotient(number, a.by_key_parts), key_part = number - part * a.key_parts, batch = quotient(part, a.by_head_parts);
    const int in_sample = part - batch * a.head_parts;
    first_head = in_sample * a.heads_per_part, group = quotient(in_sample, a.by_parts);
  }
  RL_D int all() const { return part | key_part | batch | first_head | group; }
  // The first block of a span; parts take turns there and back, since later spans see fewer queries.
  RL_D int first(const Arguments& a, int turn) const {
    return SPAN * ((turn & ~1) * a.key_parts + (turn & 1 ? 2 * a.key_parts - 1 - key_part : key_part));
  }
};
// A warpgroup's blocks of a span, by turns the outer and the inner ones: of a span's first four tiles, five squares each.
// A block that does not exist sees nothing.
struct Places {
  int inner;
  RL_D Places(int group, int spans) : inner((group + spans) % GROUPS) { static_assert(GROUPS == 2 && KEYS == 2); }
  RL_D int of(int key) const { return key == 0 ? inner : SPAN - 1 - inner; }
};

// A tile of queries on the way of a thread block.
struct Position {
  Unit unit;
  int number, turn, first, head, i, spans;  // spans: how many were begun before this one
  RL_D explicit Position(const Arguments& a)
      : unit(a, blockIdx.x), number(blockIdx.x), turn(0), first(unit.first(a, 0)), head(0), i(first), spans(0) {}
  RL_D bool exists(const Arguments& a) const { return number < a.units; }
  RL_D bool begins() const { return head == 0 && i == first; }
  RL_D void next(const Arguments& a) {
    if (++i < a.blocks) return;
    if (++head == a.heads_per_part) {
      head = 0, ++spans, first = unit.first(a, ++turn);
      if (first >= a.blocks) {
        number += gridDim.x, unit = Unit(a, number), turn = 0, first = unit.first(a, 0);
      }
    }
    i = first;
  }
};

// Of each unit, head and SPAN tiles a note: 1 when the unit's share of their dQ is there. Who writes them knows of dQ's
// warpgroup that it has begun the tile SQUARES before, and so has stored the one before that. The last tiles have none.
constexpr int BEHIND = SQUARES + 1;
RL_D bool has_note(int i, int blocks) { return i / SPAN * SPAN + SPAN - 1 + BEHIND < blocks; }
RL_D int note_of(int number, int heads_per_part, int head, int i, int blocks) {
  return (number * heads_per_part + head) * ceil_div(blocks, SPAN) + i / SPAN;
}
// Nothing of dQ is there yet; who is let in may look.
RL_D void begin_notes(const Arguments& a, int lane) {
  const int count = a.heads_per_part * ceil_div(a.blocks, SPAN);
#pragma unroll 1
  for (int number = blockIdx.x; number < a.units; number += gridDim.x)
#pragma unroll 1
    for (int n = lane; n < count; n += WARP) a.notes[number * count + n] = 0;
  sync_warp();
  if (lane == 0) fence_gpu();
  sync_warp();
  let_next_start();
}
// Once a tile's share of dQ is there. What a later span adds would come later.
RL_D void note(const Arguments& a, const Position& at, int lane) {
  if (lane == 0 && at.i % SPAN == SPAN - 1 && has_note(at.i, a.blocks) && at.unit.first(a, at.turn + 1) > at.i)
    give(a.notes + note_of(at.number, a.heads_per_part, at.head, at.i, a.blocks), 1);
}

struct Here {
  static constexpr int SQUARES_AT = STAGES * PAIR, OWN_AT = SQUARES_AT + SQUARES * SPAN * SQUARE;
  static constexpr int STATS_AT = OWN_AT + 2 * SPAN * PAIR, STATS_BYTES = 64 * 8;
  static constexpr int BARRIERS_AT = STATS_AT + STATISTICS * STATS_BYTES, BARRIERS = 2 * STAGES + 2 * SQUARES + 4;
  static constexpr int BYTES = BARRIERS_AT + 8 * BARRIERS;
  u32 smem;
  int group, warp, lane;

  RL_D Here()
      : smem(dynamic_smem()), group(warp_uniform(threadIdx.x >> 7)), warp(warp_uniform(threadIdx.x >> 5 & 3)),
        lane(static_cast<int>(threadIdx.x & 31)) {}
  RL_D u32 barrier(int number) const { return smem + BARRIERS_AT + 8 * number; }
  RL_D u32 full(u32 tile) const { return barrier(tile % STAGES); }
  RL_D u32 ready(u32 tile) const { return barrier(STAGES + tile % STAGES); }  // its statistics
  RL_D u32 square_full(u32 tile) const { return barrier(2 * STAGES + tile % SQUARES); }
  RL_D u32 square_empty(u32 tile) const { return barrier(2 * STAGES + SQUARES + tile % SQUARES); }
  RL_D u32 own_full(int spans) const { return barrier(2 * STAGES + 2 * SQUARES + (spans & 1)); }
  RL_D u32 own_empty(int spans) const { return barrier(2 * STAGES + 2 * SQUARES + 2 + (spans & 1)); }
  RL_D u32 pair(u32 tile) const { return smem + tile % STAGES * PAIR; }
  RL_D u32 stats(u32 tile) const { return smem + STATS_AT + tile % STATISTICS * STATS_BYTES; }
  RL_D u32 square(u32 tile, int place) const { return smem + SQUARES_AT + (tile % SQUARES * SPAN + place) * SQUARE; }
  RL_D u32 own(int place, int spans) const { return smem + OWN_AT + ((spans & 1) * SPAN + place) * PAIR; }  // K, V

  RL_D void start() const {
    if (threadIdx.x == 0) {
      for (int b = 0; b < BARRIERS; ++b) {
        const int of_squares = b - 2 * STAGES;
        const int of_keys = of_squares - 2 * SQUARES;
        const int arrivals = b < STAGES ? 1 : of_squares < 0 ? 4 : of_squares < SQUARES ? 4 * GROUPS : 8;
        barrier_init(barrier(b), of_keys < 0 ? arrivals : of_keys < 2 ? 1 : 4);
      }
      barrier_init_fence();
      fence_async();
    }
    sync_block();
  }
  RL_D void wait_full(u32 tile) const { barrier_wait(full(tile), tile / STAGES & 1); }
  RL_D void wait_ready(u32 tile) const { barrier_wait(ready(tile), tile / STAGES & 1); }
  RL_D void wait_square(u32 tile) const { barrier_wait(square_full(tile), tile / SQUARES & 1); }
  RL_D void wait_square_empty(u32 tile) const {
    if (tile >= SQUARES) barrier_wait(square_empty(tile), (tile / SQUARES - 1) & 1);
  }
  RL_D void wait_own(int spans) const { barrier_wait(own_full(spans), spans >> 1 & 1); }
  RL_D void wait_own_empty(int spans) const {  // before keys are copied to the place of those two spans before
    if (spans >= 2) barrier_wait(own_empty(spans), ((spans >> 1) - 1) & 1);
  }
  RL_D void arrive(u32 at) const {
    sync_warp();
    if (lane == 0) barrier_arrive(at);
  }
};

// Zeros the columns from `first` to `last` of a warp's rows `own`, `own + all` … of the column sums, from `kept` on.
RL_D void zero_column_sums(float* sums, int own, int all, int kept, int rows, int width, int first, int last, int lane) {
#pragma unroll 1
  for (int row = own; row < rows; row += all)
    if (row >= kept)
#pragma unroll 1
      for (int x = first + lane; x < last; x += WARP) sums[static_cast<i64>(row) * width + x] = 0.f;
  sync_warp();
}

}  // namespace rl
