// What the kernels with a block of queries for each warpgroup share: their units, and the keys and values that stream by.
#pragma once
#include "plain.cuh"

namespace rl {

// GROUPS blocks of queries of one head; the first ones of a head are its last queries.
struct Unit {
  int head, batch, index, top;  // top: the last key block that one of them sees
  template <typename Arguments>
  RL_D Unit(const Arguments& a, int number) {
    const int parts = ceil_div(a.blocks, GROUPS), part = parts - 1 - number % parts;
    head = number / parts, batch = head / a.heads, index = head - batch * a.heads;
    first = GROUPS * part, top = first + GROUPS < a.blocks ? first + GROUPS - 1 : a.blocks - 1;
  }
  // The query block of a warpgroup: a longer and a shorter one in turn. One that does not exist sees nothing.
  RL_D int block(int group, int round) const { return first + (group + round) % GROUPS; }

 private:
  int first;
};

template <typename Arguments, typename Place>
struct KeyStream {  // of the thread that fills the ring
  u32 count = 0;
  int round = 0, j = -1, batch = 0, group = 0;
  RL_D void fill(const Arguments& a, const Place& p, u32 end) {
    for (; count < end; ++count, --j) {
      if (j < 0) {
        const int number = unit_in(round++);
        if (number >= a.units) return;
        const Unit unit(a, number);
        j = unit.top, batch = unit.batch, group = unit.index / a.heads_per_group;
      }
      p.wait_empty(count);
      const u32 to = p.pair(count), barrier = p.full(count);
      barrier_expect(barrier, PAIR);
      copy_4d(to, a.k, 0, group, 64 * j, batch, barrier);
      copy_4d(to + TILE, a.v, 0, group, 64 * j, batch, barrier);
    }
  }
};

}  // namespace rl
