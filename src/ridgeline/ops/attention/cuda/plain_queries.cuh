// What the kernels with a block of queries for each warpgroup share: their units, and the keys and values that stream by.
#pragma once
#include "plain.cuh"

namespace rl {

// GROUPS blocks of queries of one head; the first ones of a head are its last queries.
struct Unit {
  int head, batch, index, top;  // top: the last key block that one of them sees
  template <typename Arguments>
  RL_D Unit(const Arguments& a, int number) {
    const int blocks = ceil_div(a.blocks, GROUPS);
    const Turn turn = a.turn(number);
    head = turn.whose, batch = a.sample(head), index = head - batch * a.heads;
    first = GROUPS * (blocks - 1 - turn.block), top = first + GROUPS < a.blocks ? first + GROUPS - 1 : a.blocks - 1;
  }
  // The query block of a warpgroup: a longer and a shorter one in turn. One that does not exist sees nothing.
  RL_D int block(int group, int round) const { return first + (group + round) % GROUPS; }
  // Warpgroups whose block comes before one and does not see its keys.
  RL_D int before(int block) const { return block - first; }

 private:
  int first;
};

// Starts the copies of all units: what belongs to the warpgroups' blocks by `load_own`, and keys with their values. By a warp
// each where there are as many; one of its lanes, elected, starts them.
template <typename Arguments, typename Place, typename LoadOwn>
RL_D void copy_all(const Arguments& a, const Place& p, LoadOwn load_own) {
  const bool keys = p.warp == 0, own = p.warp == 1 || !UNEVEN;
  if (!keys && !own) return;
  if (elected()) {
    if (keys) prefetch_map(a.k), prefetch_map(a.v);
    if (own) prefetch_map(a.q);
  }
  Unit unit(a, unit_in(0));
  int kv_head = a.key_head(unit.index);
  wait_for_previous_knowing(unit.batch | unit.index | kv_head);
  let_next_start();
  u32 tile = 0;
#pragma unroll 1
  for (int round = 0; unit_in(round) < a.units; unit = Unit(a, unit_in(++round)), kv_head = a.key_head(unit.index)) {
#pragma unroll 1
    for (int group = GROUPS - 1; own && group >= 0; --group) {
      p.wait_own_empty(group, round);
      if (elected()) load_own(unit, 64 * unit.block(group, round), p.own(group, round), p.own_full(group, round));
    }
#pragma unroll 1
    for (int j = unit.top; keys && j >= 0; --j, ++tile) {
      p.wait_empty(tile);
      if (!elected()) continue;
      const u32 to = p.pair(tile), barrier = p.full(tile);
      barrier_expect(barrier, PAIR);
      copy_4d(to, a.k, 0, kv_head, 64 * j, unit.batch, barrier);
      copy_4d(to + TILE, a.v, 0, kv_head, 64 * j, unit.batch, barrier);
    }
  }
}

}  // namespace rl
