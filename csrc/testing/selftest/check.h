// What all parts of the self test share.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "specdec/core/parallel.h"

namespace specdec {

inline int num_checks = 0;

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    ++::specdec::num_checks;                                                             \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

// Ranges of one index: results must not depend on how the work is divided.
inline const ParallelFor kSerial{
    [](void*, int64_t count, int64_t, ParallelFor::Body body, void* context) {
      for (int64_t i = 0; i < count; ++i) body(i, i + 1, context);
    }};

void test_numbers();              // numbers.cpp
void test_device_answer();        // device_answer.cpp
void test_thread_team();          // thread_team.cpp
void test_draft_plan();           // draft_head/plan.cpp
void test_draft_head();           // draft_head/draft_head.cpp
void test_draft_scratch();        // draft_head/scratch.cpp
void test_ops();                  // ops.cpp
void test_sampled_walk();         // sampled_walk.cpp
void test_number_formats();       // emulator/features.cpp
void test_emulator_features();    // emulator/features.cpp
void test_emulator_copies();      // emulator/copies.cpp
void test_emulator_finds_bugs();  // emulator/bugs.cpp

}  // namespace specdec
