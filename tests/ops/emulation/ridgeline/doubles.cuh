// ops/_cuda/include/ridgeline/doubles.cuh on the host. Copies happen as early or as late as their groups allow.
#pragma once
#include "ridgeline/hopper.cuh"

namespace rl {

RL_D float* shared_floats() { return &shared<float>(dynamic_smem()); }

struct QuadCopies {  // of one thread: groups not yet waited for, oldest first; the last one is open
  std::vector<std::vector<std::function<void()>>> groups{1};
};
inline std::map<int, QuadCopies> quad_copies;  // by thread
inline QuadCopies& own_copies() { return quad_copies[machine.current]; }

RL_D void copy_quad(float* to, const float* from, bool inside) {
  auto copy = [=] {
    for (int n = 0; n < 4; ++n) to[n] = inside ? from[n] : 0.f;
  };
  for (int n = 0; n < 4; ++n) to[n] = NAN;
  if (machine.late) own_copies().groups.back().push_back(copy);
  else copy();
}
RL_D void copies_commit() { own_copies().groups.emplace_back(); }
template <int PENDING>
RL_D void copies_wait() {
  auto& groups = own_copies().groups;
  while (static_cast<int>(groups.size()) > PENDING + 1) {
    for (auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

RL_D double of_lane(double value, int lane) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  bits = machine.warp().slots[machine.post(bits)][lane];
  std::memcpy(&value, &bits, 8);
  return value;
}
RL_D double shuffle_xor(double value, int mask) { return of_lane(value, machine.lane() ^ mask); }
RL_D void multiply_doubles(double (&d)[4], const double (&a)[2], double b) {
  const int row = machine.lane() / 4, column = machine.lane() % 4 * 2;
  double all[3][32];  // of the warp: A's two elements, B's one
  for (int e = 0; e < 3; ++e) {
    uint64_t bits;
    std::memcpy(&bits, e < 2 ? &a[e] : &b, 8);
    const unsigned side = machine.post(bits);
    std::memcpy(all[e], machine.warp().slots[side], sizeof all[e]);
  }
  for (int k = 0; k < 4; ++k)
    for (int m = 0; m < 2; ++m)
      for (int n = 0; n < 2; ++n) d[2 * m + n] += all[m][4 * row + k] * all[2][4 * (column + n) + k];
}

}  // namespace rl
