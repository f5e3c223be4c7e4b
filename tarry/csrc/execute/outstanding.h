// Collectives that were started, and that another process still has a part in (tarry/distributed/groups.py). Each has a ticket.
#pragma once

#include <utility>
#include <vector>

namespace tarry {

// While it lives, collectives that this thread starts are left outstanding: its owner waits for each of them before anything looks at
// the results. Without a place for tickets, a collective is waited for where it is called.
class CollectTickets {
 public:
  explicit CollectTickets(std::vector<double>* tickets) : before_(std::exchange(current(), tickets)) {}
  CollectTickets(const CollectTickets&) = delete;
  ~CollectTickets() { current() = before_; }

  // A collective was started; whether it may be left outstanding.
  static bool leave(double ticket) {
    if (current()) {
      current()->push_back(ticket);
    }
    return current() != nullptr;
  }

 private:
  static std::vector<double>*& current() {
    thread_local std::vector<double>* tickets = nullptr;
    return tickets;
  }
  std::vector<double>* const before_;
};

} // namespace tarry
