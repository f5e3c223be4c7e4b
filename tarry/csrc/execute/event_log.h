// Events that happen without Python: steps that are served here (serve.h), and reads of values.
//
// If a subscriber has to see each event as it happens, reads are reported to Python at once (and Python serves all steps, see
// Watcher). If all subscribers can wait, both are logged here, at the cost of two looks at the clock, and Python takes them
// later, many at a time. If there is none, neither happens.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "record/provenance.h"

namespace tarry {

using Clock = std::chrono::steady_clock; // that of Python's time.perf_counter()

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

struct LoggedEvent {
  enum class Kind : uint8_t { Reference, Native, Replayed, Direct, Read }; // of a step: what computed it
  Kind kind;
  int8_t device;
  std::string reason = {};
  uint64_t thread = 0; // as threading.get_ident() gives it
  uint32_t operations = 0;
  Place place;
  Clock::time_point began; // of a step: when its recording began
  Clock::time_point begin; // when it was asked for
  double wait_seconds = 0;
  double execute_seconds = 0;
  double seconds = 0;
};

void set_logging(bool on); // drops what is logged if it is turned off
bool is_logging();
// From any thread, without a lock. If Python does not take them (request_flush() asks for it when there are many), the oldest are
// overwritten.
void log_event(LoggedEvent event, const char* reason);
struct LoggedEvents {
  std::vector<LoggedEvent> events;
  uint64_t lost = 0; // overwritten since the last time
};
LoggedEvents take_events();

// Around a read of a value: `done()` once the program has it.
class ReadTimer {
 public:
  ReadTimer();
  void done(const char* method, int8_t device) {
    if (is_on_) {
      report(method, device);
    }
  }

 private:
  void report(const char* method, int8_t device);
  const bool is_on_;
  Clock::time_point begin_;
};

} // namespace tarry
