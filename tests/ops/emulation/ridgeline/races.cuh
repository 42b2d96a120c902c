// Who has seen what: every two accesses to shared memory of which one writes must be ordered by what the kernel waits for,
// under whatever schedule. Vector clocks.
//
// A clock says for each component up to which of its times its work is known. Components are the threads, what runs beside
// them in order (a warp's tensor core by groups of products, a thread's copies to memory by groups of copies), a warp's
// stmatrix and ldmatrix one after the other, which are its own and not a lane's, and the phases of barriers, which stand for
// the copies that complete them. What is ordered is what PTX orders: __syncwarp, bar.sync and bar.red both ways, bar.arrive
// and an mbarrier's arrivals towards those who wait; not shuffles and votes. Tensor cores and copy engine see an ordinary store only if a proxy fence stands between it and the signal, or
// between the signal and them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace emulation {

constexpr int EXTRA_COMPONENTS = 256;
// What is no thread: the copies that a barrier counts, a thread's copies to memory, a warp's tensor core.
enum Kind : uint32_t { BARRIER_COPIES, THREAD_COPIES, TENSOR_CORE, MATRICES };
const std::string KINDS[] = {"copies of barrier ", "copies of thread ", "the tensor core of warp ", "matrices of warp "};

struct Clock {
  std::vector<uint32_t> seen, fenced;  // all that is known; of that, what the asynchronous engines see
  explicit Clock(int components = 0) : seen(components), fenced(components) {}
  __attribute__((optimize("O3"))) void join(const Clock& other) {
    uint32_t *a = seen.data(), *b = fenced.data();
    const uint32_t *c = other.seen.data(), *d = other.fenced.data();
    for (size_t i = 0; i < other.seen.size(); ++i) a[i] = std::max(a[i], c[i]), b[i] = std::max(b[i], d[i]);
  }
  __attribute__((optimize("O3"))) void meet(const Clock& other) {
    for (size_t i = 0; i < seen.size(); ++i)
      seen[i] = std::min(seen[i], other.seen[i]), fenced[i] = std::min(fenced[i], other.fenced[i]);
  }
};
struct Event {
  int who = 0;
  uint32_t when = 0;
};
struct Cell {  // two bytes
  Event written;
  bool by_engine = false;
  std::vector<Event> reads;  // since
};

class Races {
 public:
  void reset(int threads, size_t bytes) {
    clocks_.assign(threads, Clock(threads + EXTRA_COMPONENTS));
    for (int t = 0; t < threads; ++t) clocks_[t].seen[t] = 1;
    sent_.clear(), names_.clear(), cells_.assign(bytes / 2, Cell{}), threads_ = threads;
  }
  Clock& of(int thread) { return clocks_[thread]; }
  Event now(int thread) { return {thread, clocks_[thread].seen[thread]}; }
  int component(Kind kind, uint32_t number) {
    const auto [place, added] = names_.try_emplace(uint64_t{kind} << 32 | number, threads_ + static_cast<int>(names_.size()));
    if (added && static_cast<int>(names_.size()) > EXTRA_COMPONENTS) std::fprintf(stderr, "too many components\n"), std::abort();
    return place->second;
  }
  // Give and take: what a signal carries.
  void give(int thread, std::shared_ptr<Clock>& to) {
    if (!to) to = std::make_shared<Clock>(threads_ + EXTRA_COMPONENTS);
    to->join(clocks_[thread]);
    ++clocks_[thread].seen[thread];
  }
  void take(int thread, const std::shared_ptr<Clock>& from) {
    if (from) clocks_[thread].join(*from);
  }
  void fence(int thread) {
    clocks_[thread].fenced = clocks_[thread].seen;
    ++clocks_[thread].seen[thread];  // what is written from here on is not
  }
  void learn(int thread, int component, uint32_t time) {
    uint32_t& known = clocks_[thread].seen[component];
    known = std::max(known, time);
  }
  // Whether the access is ordered after all others; `engine`: it is the tensor core's or the copy engine's.
  bool read(uint32_t address, uint32_t bytes, Event by, const Clock& clock, bool engine) {
    for (uint32_t n = address / 2; n < (address + bytes) / 2; ++n) {
      Cell& cell = cells_[n];
      if (!knows(clock, cell, engine)) return tell("a read", address, by, cell.written, "a write");
      note(cell.reads, by, clock);
    }
    return true;
  }
  bool write(uint32_t address, uint32_t bytes, Event by, const Clock& clock, bool engine) {
    for (uint32_t n = address / 2; n < (address + bytes) / 2; ++n) {
      Cell& cell = cells_[n];
      if (!knows(clock, cell, engine)) return tell("a write", address, by, cell.written, "a write");
      for (const Event& read : cell.reads)
        if (clock.seen[read.who] < read.when) return tell("a write", address, by, read, "a read");
      cell.written = by, cell.by_engine = engine, cell.reads.clear();
    }
    return true;
  }
  // An arrival at a barrier of another block, which must not have left: one of its threads is to know of it.
  void send(int thread, uint32_t rank) { sent_[{thread, rank}] = now(thread).when; }
  bool all_came(int threads) {
    for (const auto& [way, when] : sent_) {
      bool known = false;
      for (int t = threads * way.second; t < threads * static_cast<int>(way.second + 1); ++t)
        known = known || clocks_[t].seen[way.first] >= when;
      if (known) continue;
      message_ = "an arrival by " + describe(way.first) + " may come when block " + std::to_string(way.second) + " has left";
      return false;
    }
    return true;
  }
  const char* last() const { return message_.c_str(); }

 private:
  static bool knows(const Clock& clock, const Cell& cell, bool engine) {
    const auto& times = engine && !cell.by_engine ? clock.fenced : clock.seen;
    return times[cell.written.who] >= cell.written.when;
  }
  static void note(std::vector<Event>& reads, Event by, const Clock& clock) {
    size_t kept = 0;  // of those that are not known to be over
    for (const Event& read : reads)
      if (read.who != by.who && clock.seen[read.who] < read.when) reads[kept++] = read;
    reads.resize(kept);
    reads.push_back(by);
  }
  std::string describe(int who) const {
    if (who < threads_) return "thread " + std::to_string(who);
    for (const auto& [name, component] : names_)
      if (component == who) return KINDS[name >> 32] + std::to_string(static_cast<uint32_t>(name));
    return "nobody";
  }
  bool tell(const char* what, uint32_t address, Event by, Event other, const char* other_what) {
    message_ = std::string(what) + " of shared byte " + std::to_string(address) + " by " + describe(by.who) +
               " is not ordered after " + other_what + " by " + describe(other.who);
    return false;
  }
  std::vector<Clock> clocks_;
  std::map<std::pair<int, uint32_t>, uint32_t> sent_;  // by whom and to which block: the last one's time
  std::map<uint64_t, int> names_;
  std::vector<Cell> cells_;
  int threads_ = 0;
  std::string message_;
};

}  // namespace emulation
