// Hopper's tensor cores on the host: the rest of hopper.cuh, which includes it.
#pragma once

namespace rl {

inline u32 element_address(u32 block, u64 descriptor, int transposed, int mn, int k) {
  const u32 start = block + ((descriptor & 0x3fff) << 4), group = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62;
  const u32 row = mode == 1 ? 128 : 64;  // swizzle of 128 or of 64 bytes
  if (mode != 1 && mode != 2) machine.fail("operand without a swizzle");
  const u32 span = row / 2, far = (descriptor >> 16 & 0x3fff) << 4;  // values a row of a tile holds; to the next tile
  const u32 major = transposed ? k : mn, minor = transposed ? mn % span : k, tile = transposed ? mn / span * far : 0;
  return swizzled(start + tile + major / 8 * group + major % 8 * row + 2 * minor, row);
}
RL_D float element(u32 block, u64 descriptor, int transposed, int mn, int k) {
  return pair_low(shared<u16>(element_address(block, descriptor, transposed, mn, k)));
}
RL_D void execute(emulation::Warp& warp, int index, const emulation::Product& p) {
  std::vector<float>& values = warp.in_flight.at(p.d[0]);
  const u32 block = index / (machine.threads / 32) * emulation::SMEM_STRIDE;
  for (int r = 0; r < 16; ++r) {
    float a[16];
    for (int k = 0; k < 16; ++k) {
      const u32 pair = p.a_registers[r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2];
      a[k] = p.registers ? (k % 2 ? pair_high(pair) : pair_low(pair)) : element(block, p.a, p.transposed_a, 16 * (index % 4) + r, k);
    }
    for (int c = 0; c < p.n; ++c) {
      float& d = values[(r % 8 * 4 + c % 8 / 2) * (p.n / 2) + c / 8 * 4 + r / 8 * 2 + c % 2];
      float sum = p.accumulate ? d : 0.f;
      for (int k = 0; k < 16; ++k) sum += a[k] * element(block, p.b, p.transposed_b, c, k);
      d = sum;
    }
  }
}
inline void check_product(emulation::Warp& warp, int index, const emulation::Product& p) {
  Clock clock = machine.races.of(32 * index);  // what every lane knows
  for (int l = 1; l < 32; ++l) clock.meet(machine.races.of(32 * index + l));
  const Event by{machine.races.component(emulation::TENSOR_CORE, index), warp.committed + 1};
  const u32 block = index / (machine.threads / 32) * emulation::SMEM_STRIDE;
  for (int k = 0; k < 16; ++k) {
    for (int r = 0; r < 16 && !p.registers; ++r)
      machine.check(machine.races.read(element_address(block, p.a, p.transposed_a, 16 * (index % 4) + r, k), 2, by, clock, true));
    for (int c = 0; c < p.n; ++c)
      machine.check(machine.races.read(element_address(block, p.b, p.transposed_b, c, k), 2, by, clock, true));
  }
}
RL_D void issue(int n, float* d, const u32* a_registers, u64 a, u64 b, int ta, int tb, int accumulate) {
  auto& warp = machine.warp();
  const int index = machine.current / 32;
  emulation::Product p{n, ta, tb, accumulate, a_registers != nullptr, a, b, {}, {}};
  for (int x = 0; x < 4 && a_registers; ++x) {
    const unsigned side = machine.post(a_registers[x]);
    for (int l = 0; l < 32; ++l) p.a_registers[l][x] = static_cast<u32>(warp.slots[side][l]);
  }
  const unsigned side = machine.post(reinterpret_cast<u64>(d));
  for (int l = 0; l < 32; ++l) p.d[l] = reinterpret_cast<float*>(warp.slots[side][l]);
  if (machine.lane() == 0) {
    check_product(warp, index, p);
    if (!warp.in_flight.count(d)) {
      auto& values = warp.in_flight[d];
      for (float* lane : p.d) values.insert(values.end(), lane, lane + n / 2), std::fill(lane, lane + n / 2, NAN);
    }
    if (!machine.late) execute(warp, index, p);
    warp.open.push_back(p);
  }
  machine.post(0);
}
template <int N, int TRANSPOSED_A, int TRANSPOSED_B>
RL_D void wgmma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
  issue(N, d, nullptr, a, b, TRANSPOSED_A, TRANSPOSED_B, accumulate);
}
template <int N, int TRANSPOSED_B>
RL_D void wgmma_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {
  issue(N, d, a, 0, b, 0, TRANSPOSED_B, accumulate);
}
RL_D void wgmma_fence() {}
RL_D void wgmma_commit() {
  auto& warp = machine.warp();
  if (machine.lane() == 0) warp.groups.push_back(std::move(warp.open)), warp.open.clear(), ++warp.committed;
  machine.post(0);
}
template <int PENDING>
RL_D void wgmma_wait() {
  auto& warp = machine.warp();
  machine.post(0);
  if (warp.committed > PENDING)
    machine.races.learn(machine.current, machine.races.component(emulation::TENSOR_CORE, machine.current / 32), warp.committed - PENDING);
  if (machine.lane() == 0) {
    std::map<float*, emulation::Product> finished;
    while (warp.groups.size() > PENDING) {
      for (auto& p : warp.groups.front()) {
        if (machine.late) execute(warp, machine.current / 32, p);
        finished[p.d[0]] = p;
      }
      warp.groups.erase(warp.groups.begin());
    }
    for (auto& [d, p] : finished) {
      bool again = false;
      for (auto& group : warp.groups)
        for (auto& other : group) again = again || other.d[0] == d;
      if (again) continue;
      for (int l = 0; l < 32; ++l) std::copy_n(warp.in_flight[d].begin() + l * (p.n / 2), p.n / 2, p.d[l]);
      warp.in_flight.erase(d);
    }
  }
  machine.post(0);
}
template <int COUNT>
RL_D void wgmma_touch(float (&)[COUNT]) {}
template <int ROWS, int COUNT>
RL_D void wgmma_touch(u32 (&)[ROWS][COUNT]) {}

}  // namespace rl
