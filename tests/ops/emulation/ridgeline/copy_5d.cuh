// ops/_cuda/include/ridgeline/copy_5d.cuh and ops/mlp/access.cuh on the host; see hopper.cuh beside this.
#pragma once
#include "ridgeline/hopper.cuh"

#include <deque>

namespace rl {

// The map's dimensions are the four inner ones; the outermost, `outer_extent` long, has four times the third's pitch.
RL_D void copy_5d(u32 destination, const TensorMap* map, int x, int y, int z, int v, int w, u32 barrier) {
  static std::deque<TensorMap> shifted;  // a copy reads its map when it ends
  const u32 outer = map->box[1] * map->box[2] * map->box[3] * map->box[0] * 2;
  for (u32 n = 0; n < map->outer_box; ++n) {
    shifted.push_back(*map);
    shifted.back().base += (w + n) * 4 * map->stride[2];
    if (w + static_cast<int>(n) >= static_cast<int>(map->outer_extent)) shifted.back().extent[0] = 0;
    copy_4d(destination + n * outer, &shifted.back(), x, y, z, v, barrier);
  }
}
RL_D uint4 load_here(const void* pointer) { return *static_cast<const uint4*>(pointer); }
RL_D void prefetch_bytes(const void*, u32) {}
RL_D u32 afresh(u32 value) { return value; }
RL_D float reciprocal_root(float x) { return 1.f / std::sqrt(x); }
RL_D uint4 load_stream(const uint4* pointer) { return *pointer; }
RL_D u32 load_shared_u32(u32 address) { return load<u32>(address); }
RL_D void store_shared_u32(u32 address, u32 value) { store<u32>(address, value); }
RL_D float load_shared(u32 address) { return load<float>(address); }
RL_D void store_shared(u32 address, float value) { store<float>(address, value); }
RL_D void store_shared_4(u32 address, float a, float b, float c, float d) {
  const float v[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) store<float>(address + 4 * i, v[i]);
}
RL_D void load_shared_4(float (&v)[4], u32 address) {
  for (int i = 0; i < 4; ++i) v[i] = load<float>(address + 4 * i);
}
template <int PENDING>
RL_D void store_wait() {
  store_wait_read<PENDING>();
}

}  // namespace rl
