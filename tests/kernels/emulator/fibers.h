// Blocks of a kernel on a CPU, one fiber per thread.
//
// It is meaner than a GPU. Fibers run in a random order until they wait, and half of the warps stand still until the
// others cannot go on, then other ones; blocks come in a random order. A collective that some lanes miss, an address
// outside of shared memory and threads that wait for ever are errors. A `__syncwarp` left out is not seen: the
// collectives around it wait for all lanes here. For that there is compute-sanitizer.
//
// Whoever includes this first defines `machine::Held`, what the machine keeps for a thread, and `machine::BASE`, the
// address of dynamic shared memory.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>

namespace machine {

constexpr size_t STACK = 1 << 18;
struct Dim {
  u32 x, y;
};
struct Thread : Held {
  jmp_buf place;  // where it goes on
  bool begun = false, done = false;
  std::function<bool()> waits;
  u64 collectives = 0;
};
constexpr int WORDS = 6;  // most of a collective
struct Exchange {         // of one warp: two rounds, since no lane is two ahead
  u32 value[2][WORDS][32], tag[2];
  int arrived[2];
};
struct Barrier {
  int arrived = 0;
  u64 round = 0;
  bool any[2] = {};  // what threads say that arrive, of this round and of the next one
};

inline std::vector<Thread> threads;
inline std::vector<Exchange> warps;
inline Barrier barrier;  // of the block
inline std::vector<u8> shared;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of the threads, for one block after the other
inline jmp_buf scheduler;
inline int current;
inline Dim block;
inline bool eager;  // copies land at once, else as late as they may
inline std::string failure;

[[noreturn]] inline void fail(const std::string& what);
inline Thread& self() { return threads[current]; }
// Fibers switch by jumps: swapcontext would ask the kernel for the signal mask every time.
inline void leave() {
  if (!_setjmp(self().place)) _longjmp(scheduler, 1);
}
inline void begin(void (*fiber)()) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks[current].get();
  context.uc_stack.ss_size = STACK;
  makecontext(&context, fiber, 0);
  setcontext(&context);
}
inline void go_on(void (*fiber)()) {
  if (_setjmp(scheduler)) return;
  if (self().begun) _longjmp(self().place, 1);
  self().begun = true;
  begin(fiber);
}
template <class Until>
void wait(Until until) {
  if (until()) return;
  self().waits = until;
  leave();
}
inline std::string block_name() {
  return "block " + std::to_string(block.x) + (block.y ? ", " + std::to_string(block.y) : "");
}
inline void fail(const std::string& what) {
  if (failure.empty()) failure = what + " (" + block_name() + ", thread " + std::to_string(current) + ")";
  self().done = true;
  leave();
  throw std::logic_error("unreachable");
}
inline void check(bool good, const char* what) {
  if (!good) fail(what);
}
inline u8* at(u32 address, u32 size) {
  check(address >= BASE && address - BASE + size <= shared.size(), "address outside of shared memory");
  check(address % size == 0, "address not aligned");
  return &shared[address - BASE];
}
inline bool arrive_and_wait(bool said = false) {
  const u64 round = barrier.round;
  barrier.any[round % 2] |= said;
  if (++barrier.arrived == (int)threads.size()) {
    barrier.arrived = 0;
    barrier.any[++barrier.round % 2] = false;
  }
  wait([round] { return barrier.round > round; });
  return barrier.any[round % 2];
}
// Word by word the values of all lanes of this warp.
template <int N>
const u32 (*exchange(const u32 (&values)[N], u32 tag))[32] {
  static_assert(N <= WORDS);
  const int warp = current / 32, round = self().collectives++ % 2;
  Exchange& x = warps[warp];
  if (x.arrived[round] % 32 == 0) x.tag[round] = tag;
  check(x.tag[round] == tag, "lanes of a warp are at different collectives");
  for (int i = 0; i < N; i++) x.value[round][i][current % 32] = values[i];
  const int full = (x.arrived[round]++ / 32 + 1) * 32;
  wait([warp, round, full] { return warps[warp].arrived[round] >= full; });
  return x.value[round];
}
inline const u32* exchange(u32 value, u32 tag) {
  const u32 values[1] = {value};
  return exchange(values, tag)[0];
}

// Runs the fibers of one block to their end.
inline void run_block(int size, u32 bytes, std::mt19937& random, void (*fiber)()) {
  shared.assign(bytes, 0xFF);  // NaN
  warps.assign(size / 32, Exchange{});
  barrier = {};
  threads = std::vector<Thread>(size);
  std::vector<int> order(size);
  while ((int)stacks.size() < size) stacks.emplace_back(new char[STACK]);
  for (int i = 0; i < size; i++) order[i] = i;
  std::vector<bool> still(size / 32);
  for (auto warp = still.begin(); warp != still.end(); ++warp) *warp = random() % 2;
  int turn = 1;
  for (bool alive = true; alive;) {
    std::shuffle(order.begin(), order.end(), random);
    bool moved = alive = false;
    for (int i : order) {
      Thread& t = threads[i];
      alive |= !t.done;
      if (t.done || still[i / 32] || (t.waits && !t.waits())) continue;
      t.waits = nullptr;
      current = i;
      moved = true;
      go_on(fiber);
      if (!failure.empty()) return;
    }
    if (moved ? turn > 0 : !alive) continue;
    if (!moved && turn == 0) {
      failure = "threads wait for ever in " + block_name();
      return;
    }
    turn = (turn + 1) % 3;  // all; some; the others, on stalls; all again
    for (auto warp = still.begin(); warp != still.end(); ++warp) *warp = turn == 1 ? random() % 2 : turn == 2 && !*warp;
  }
}
// Runs the blocks of a grid one after the other; an error message, or nothing.
inline std::string run(Dim grid, int size, u32 bytes, bool at_once, u32 seed, const std::function<void()>& kernel) {
  static const std::function<void()>* body;
  std::mt19937 random(seed);
  eager = at_once;
  body = &kernel;
  failure.clear();
  std::vector<u32> blocks(grid.x * grid.y);
  for (u32 i = 0; i < blocks.size(); i++) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (u32 i : blocks) {
    block = {i % grid.x, i / grid.x};
    run_block(size, bytes, random, [] {
      (*body)();
      self().done = true;
      leave();
    });
    if (!failure.empty()) break;
  }
  return failure;
}

}  // namespace machine
