#include <Python.h>

#include "record/provenance.h"

// Raw interpreter frames: walking them allocates nothing, while PyFrame_GetBack makes a frame object per level.
// Checked on CPython 3.11 and 3.12; later versions take the public, slower way.
#if PY_VERSION_HEX < 0x030D0000
#define TARRY_RAW_FRAMES 1
#define Py_BUILD_CORE 1
extern "C" {
#include <internal/pycore_frame.h>
}
#undef Py_BUILD_CORE
#endif

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>
#endif

#include <array>
#include <atomic>
#include <vector>

namespace tarry {
namespace {

struct Site {
  PyCodeObject* code;
  int instruction; // byte offset in the code
};

struct SiteKey {
  PyCodeObject* code;
  int instruction;
  bool operator==(const SiteKey& other) const { return code == other.code && instruction == other.instruction; }
};

struct SiteKeyHash {
  size_t operator()(const SiteKey& key) const {
    return (reinterpret_cast<size_t>(key.code) >> 4) * 0x9e3779b97f4a7c15ULL + static_cast<size_t>(key.instruction);
  }
};

// Whose code a frame runs. Backward runs on the thread that asked for it: below the engine's entry, frames are the caller's,
// and say nothing about what the engine is doing.
enum class Code : uint8_t { User, Internal, EngineEntry };

// What is known of code objects and sites. The global table is guarded by the GIL; each thread has a copy of what it has
// met, which it reads without the GIL: PyTorch releases it while an operator is dispatched.
struct Sites {
  std::vector<Site> sites{Site{nullptr, 0}};
  ska::flat_hash_map<SiteKey, uint32_t, SiteKeyHash> ids;
  ska::flat_hash_map<PyCodeObject*, Code> kinds; // codes are owned: their addresses must not be used again
  std::vector<std::string> internal_paths;
};

struct ThreadSites {
  ska::flat_hash_map<SiteKey, uint32_t, SiteKeyHash> ids;
  ska::flat_hash_map<PyCodeObject*, Code> kinds;
};

Sites& sites() {
  static auto* instance = new Sites();
  return *instance;
}

ThreadSites& thread_sites() {
  static thread_local ThreadSites instance;
  return instance;
}

Code judge_code(PyCodeObject* code) {
  PyGILState_STATE gil = PyGILState_Ensure();
  auto& shared = sites();
  auto it = shared.kinds.find(code);
  if (it == shared.kinds.end()) {
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    bool user = file != nullptr;
    if (file) {
      const std::string name(file);
      user = name.rfind("<frozen", 0) != 0;
      for (const std::string& prefix : shared.internal_paths) {
        user = user && name.rfind(prefix, 0) != 0;
      }
    } else {
      PyErr_Clear();
    }
    const bool entry = !user && PyUnicode_CompareWithASCIIString(code->co_name, "_engine_run_backward") == 0;
    Py_INCREF(code);
    it = shared.kinds.emplace(code, user ? Code::User : entry ? Code::EngineEntry : Code::Internal).first;
  }
  const Code kind = it->second;
  PyGILState_Release(gil);
  return kind;
}

Code kind_of(PyCodeObject* code) {
  auto& known = thread_sites().kinds;
  auto it = known.find(code);
  if (it == known.end()) {
    it = known.emplace(code, judge_code(code)).first;
  }
  return it->second;
}

uint32_t intern_site(PyCodeObject* code, int instruction) {
  auto& known = thread_sites().ids;
  const SiteKey key{code, instruction};
  auto it = known.find(key);
  if (it == known.end()) {
    PyGILState_STATE gil = PyGILState_Ensure();
    auto& shared = sites();
    auto [entry, inserted] = shared.ids.emplace(key, static_cast<uint32_t>(shared.sites.size()));
    if (inserted) {
      shared.sites.push_back({code, instruction}); // owned through kinds
    }
    it = known.emplace(key, entry->second).first;
    PyGILState_Release(gil);
  }
  return it->second;
}

#ifdef TARRY_RAW_FRAMES
// The frames of this thread stand still while it is in here, with or without the GIL.
uint32_t python_site() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!thread || !thread->cframe) {
    return 0;
  }
  uint32_t steps = 0;
  for (_PyInterpreterFrame* frame = thread->cframe->current_frame; frame && steps < 200; frame = frame->previous, ++steps) {
#if PY_VERSION_HEX >= 0x030C0000
    if (frame->owner == FRAME_OWNED_BY_CSTACK) {
      continue;
    }
#endif
    PyCodeObject* code = frame->f_code;
    const Code kind = kind_of(code);
    if (kind == Code::EngineEntry) {
      return 0;
    }
    if (kind == Code::User) {
      return intern_site(code, _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT)));
    }
  }
  return 0;
}
#else
uint32_t python_site() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!thread) {
    return 0;
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  uint32_t site = 0;
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Code kind = kind_of(code);
    if (kind == Code::User) {
      site = intern_site(code, PyFrame_GetLasti(frame));
    }
    Py_DECREF(code);
    PyFrameObject* back = kind == Code::Internal ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(gil);
  return site;
}
#endif

// Sites of recent differentiable operators by the sequence number of their autograd node: what backward inherits.
// A lossy ring: a site that was overwritten is merely unknown.
struct ForwardSite {
  std::atomic<uint64_t> sequence{0};
  std::atomic<uint64_t> thread{0};
  std::atomic<uint32_t> site{0};
};
constexpr size_t kRing = 1 << 16;

// All zeros at the start, so that it takes no memory but what is used of it.
std::array<ForwardSite, kRing> forward_sites;

uint32_t backward_site() {
  auto node = torch::autograd::get_current_node();
  if (!node) {
    return 0;
  }
  const uint64_t sequence = node->sequence_nr();
  const ForwardSite& entry = forward_sites[sequence % kRing];
  const bool matches = entry.sequence.load(std::memory_order_relaxed) == sequence &&
      entry.thread.load(std::memory_order_relaxed) == node->thread_id();
  return matches ? entry.site.load(std::memory_order_relaxed) : 0;
}

} // namespace

uint32_t current_site() {
  const uint32_t site = python_site();
  if (!site) {
    return backward_site();
  }
  if (c10::GradMode::is_enabled()) {
    // Autograd has just made this operator's node, if it has one; its number is the one before the next.
    const uint64_t sequence = at::sequence_number::peek() - 1;
    ForwardSite& entry = forward_sites[sequence % kRing];
    entry.sequence.store(sequence, std::memory_order_relaxed);
    entry.thread.store(at::RecordFunction::currentThreadId(), std::memory_order_relaxed);
    entry.site.store(site, std::memory_order_relaxed);
  }
  return site;
}

std::pair<std::string, int> site_location(uint32_t site) {
  auto& shared = sites();
  if (site == 0 || site >= shared.sites.size()) {
    return {"", 0};
  }
  const Site& entry = shared.sites[site];
  const char* file = PyUnicode_AsUTF8(entry.code->co_filename);
  if (!file) {
    PyErr_Clear();
  }
  return {file ? file : "", PyCode_Addr2Line(entry.code, entry.instruction)};
}

std::string describe_site(uint32_t site) {
  PyGILState_STATE gil = PyGILState_Ensure();
  auto [file, line] = site_location(site);
  PyGILState_Release(gil);
  return file.empty() ? "an unknown line" : file + ":" + std::to_string(line);
}

void add_internal_path(const std::string& prefix) {
  sites().internal_paths.push_back(prefix);
}

} // namespace tarry
