// Teams of threads: every index of every loop is visited once, whether members help early, late or
// never.
#include "specdec/cpu/thread_team.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

namespace specdec {
namespace {

constexpr int64_t kLoops = 300;

// A random pause, in which others may take a chunk or the leader may go on too early.
void dawdle() {
  static std::atomic<int> turn{0};
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(++turn * 7 % 10);
  while (std::chrono::steady_clock::now() < until) {
  }
}

// Loops of changing lengths, each of which reads what the previous one has written.
void run_loops(const ParallelFor& parallel_for) {
  std::vector<int64_t> numbers(97, 0);
  for (int64_t loop = 0; loop < kLoops; ++loop) {
    const int64_t count = loop % 98, grain = loop % 5 * 16;
    std::atomic<int64_t> calls{0};
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
      ++calls;
      dawdle();
      for (int64_t i = begin; i < end; ++i) numbers[i] += 1;
    });
    CHECK(calls.load() <= count);
    for (int64_t i = 0; i < 97; ++i) CHECK(numbers[i] == (i < count ? 1 : 0));
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      dawdle();
      for (int64_t i = begin; i < end; ++i) numbers[i] -= 1;
    });
    for (int64_t i = 0; i < 97; ++i) CHECK(numbers[i] == 0);
  }
}

void test_team(int64_t threads, int64_t helpers) {
  cpu::ThreadTeam team(threads);
  std::vector<std::thread> members;
  for (int64_t i = 0; i < helpers; ++i) members.emplace_back([&] { team.help(); });
  team.lead(run_loops);
  for (std::thread& member : members) member.join();
  team.help();  // too late: returns at once
}

// Members are released if the work ends with an exception.
void test_exception() {
  cpu::ThreadTeam team(2);
  std::thread member([&] { team.help(); });
  bool is_caught = false;
  try {
    team.lead([](const ParallelFor&) { throw std::runtime_error("of the work"); });
  } catch (const std::runtime_error&) {
    is_caught = true;
  }
  member.join();
  CHECK(is_caught);
}

// After a long wait there are no helpers for a pause; repeated waits make it longer, good runs
// shorter.
void test_sharing() {
  constexpr int64_t kMillisecond = 1'000'000;
  cpu::Sharing sharing;
  int64_t now = 5 * kMillisecond;
  const auto pause = [&] {
    sharing.report(2 * kMillisecond, 2 * kMillisecond, now);
    int64_t pause = 0;
    while (sharing.is_alone(now)) now += kMillisecond, pause += kMillisecond;
    return pause;
  };
  CHECK(!sharing.is_alone(now));
  sharing.report(cpu::Sharing::kLongWait, cpu::Sharing::kLongWait, now);
  sharing.report(12 * kMillisecond, 100 * kMillisecond, now);  // a long run, in which it is little
  CHECK(!sharing.is_alone(now));
  CHECK(pause() == cpu::Sharing::kFirstPause);
  CHECK(pause() == 2 * cpu::Sharing::kFirstPause);
  for (int i = 0; i < 10; ++i) CHECK(pause() <= cpu::Sharing::kLastPause);
  CHECK(pause() == cpu::Sharing::kLastPause);
  now += cpu::Sharing::kSoon - kMillisecond;
  CHECK(pause() == cpu::Sharing::kLastPause);
  now += cpu::Sharing::kSoon;
  CHECK(pause() == cpu::Sharing::kFirstPause);
}

// The time that a leader waits for a member's unfinished chunk is counted.
void test_waited() {
  cpu::ThreadTeam team(2);
  std::atomic<bool> is_there{false};
  std::thread member([&] { team.help(); });
  team.lead([&](const ParallelFor& parallel_for) {
    const auto leader = std::this_thread::get_id();
    parallel_for(2, 1, [&](int64_t, int64_t) {
      if (std::this_thread::get_id() == leader) {
        while (!is_there) std::this_thread::yield();
      } else {
        is_there = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    });
  });
  member.join();
  CHECK(team.waited() > 10'000'000);
}

}  // namespace

void test_thread_team() {
  test_sharing();
  test_waited();
  test_team(1, 0);
  test_team(2, 1);
  test_team(3, 2);
  test_team(8, 7);
  test_team(4, 0);
  test_exception();
}

}  // namespace specdec
