// Replays and their guards, as Python sees them.
#include <torch/csrc/autograd/python_variable.h>

#include "core/generator.h"
#include "replay/host_reads.h"
#include "bind/bind.h"
#include "bind/guard.h"
#include "core/numbers.h"
#include "record/provenance.h"
#include "replay/replay.h"

namespace py = pybind11;

namespace tarry {
namespace {

using Sites = std::vector<std::pair<std::string, int>>;

Sites locations(const std::vector<uint32_t>& sites) {
  Sites found;
  for (const uint32_t site : sites) {
    found.push_back(site_location(site));
  }
  return found;
}

// A ref is written as (kind, index).
using RefTuple = std::pair<std::string, uint32_t>;

Replay::StorageRef to_ref(const RefTuple& ref) {
  static const std::pair<const char*, Replay::From> kinds[] = {
      {"argument", Replay::From::Argument}, {"gradient", Replay::From::Gradient}, {"kept", Replay::From::Kept},
      {"fresh", Replay::From::Fresh},       {"uploaded", Replay::From::Uploaded}, {"host", Replay::From::UploadedHost},
      {"dropped", Replay::From::Dropped}};
  for (const auto& [name, from] : kinds) {
    if (ref.first == name) {
      return {from, ref.second};
    }
  }
  TORCH_CHECK(false, "tarry: there is no ref '", ref.first, "'");
}

std::vector<Replay::StorageRef> to_refs(const std::vector<RefTuple>& refs) {
  std::vector<Replay::StorageRef> found;
  for (const RefTuple& ref : refs) {
    found.push_back(to_ref(ref));
  }
  return found;
}

// A tensor to be made is written as its ref, dtype, sizes, strides and offset.
using TensorTuple = std::tuple<RefTuple, c10::ScalarType, std::vector<int64_t>, std::vector<int64_t>, int64_t>;

Replay::Tensor to_tensor(const TensorTuple& spec) {
  const auto& [ref, dtype, sizes, strides, offset] = spec;
  return {to_ref(ref), intern_layout(dtype, sizes, strides, offset)};
}

std::shared_ptr<Replay> make_replay(
    const Snapshot& snapshot, const std::vector<RefTuple>& sources, const std::vector<RefTuple>& targets,
    const std::vector<TensorTuple>& results, const std::vector<std::pair<RefTuple, std::optional<TensorTuple>>>& gradients,
    std::vector<at::Tensor> holders, std::vector<at::Tensor> hosts, std::vector<at::Tensor> written,
    const std::vector<uint64_t>& kept, std::vector<std::pair<uint32_t, uint64_t>> seeds, uint64_t draws,
    std::vector<uint32_t> numbers) {
  Replay::Plan plan;
  plan.sources = to_refs(sources);
  plan.targets = to_refs(targets);
  for (const auto& result : results) {
    plan.results.push_back(to_tensor(result));
  }
  for (const auto& [holder, tensor] : gradients) {
    plan.gradients.push_back({to_ref(holder), tensor ? std::make_optional(to_tensor(*tensor)) : std::nullopt});
  }
  plan.holders = std::move(holders);
  plan.hosts = std::move(hosts);
  plan.written = std::move(written);
  plan.seeds = std::move(seeds);
  plan.draws = draws;
  plan.numbers = std::move(numbers);
  for (const uint64_t serial : kept) {
    const auto leaf = std::find_if(
        snapshot.leaves.begin(), snapshot.leaves.end(), [serial](const Trace::Leaf& leaf) { return leaf.serial == serial; });
    const auto root = std::find(snapshot.serials.begin(), snapshot.serials.end(), serial);
    TORCH_CHECK(
        leaf != snapshot.leaves.end() || root != snapshot.serials.end(), "tarry: a replay can keep only what its step uses");
    plan.kept.push_back(leaf != snapshot.leaves.end() ? leaf->storage : snapshot.storages[root - snapshot.serials.begin()]);
  }
  return std::make_shared<Replay>(snapshot, std::move(plan));
}

std::vector<at::Tensor> tensors_in(const py::list& leaves) {
  std::vector<at::Tensor> found;
  found.reserve(leaves.size());
  for (const py::handle& leaf : leaves) {
    found.push_back(THPVariable_Check(leaf.ptr()) ? THPVariable_Unpack(leaf.ptr()) : at::Tensor());
  }
  return found;
}

py::object arm(Replay& replay, const py::list& leaves, const std::vector<double>& numbers) {
  auto armed = replay.arm(tensors_in(leaves), numbers);
  if (const auto* reason = std::get_if<std::string>(&armed)) {
    return py::str(*reason);
  }
  py::list results;
  for (at::Tensor& tensor : std::get<std::vector<at::Tensor>>(armed)) {
    results.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor))));
  }
  return results;
}

void bind_guards(py::module& m) {
  py::class_<Guard>(m, "Guard", "Checks of Python objects and tensors. Does not keep them alive: its maker has to.")
      .def(py::init<>())
      .def("dict_item", &Guard::dict_item)
      .def("dict_entries", &Guard::dict_entries, py::arg("dict"), py::arg("rate") = py::none())
      .def("rate", &Guard::rate)
      .def("list_item", &Guard::list_item)
      .def("attribute", &Guard::attribute)
      .def("cell", &Guard::cell)
      .def("length", &Guard::length)
      .def("tensor", &Guard::tensor)
      .def("failing", &Guard::failing, py::arg("with_gradients") = true, py::arg("with_rates") = true)
      .def("__len__", &Guard::size);
  py::class_<ArgumentGuard>(m, "ArgumentGuard", "As Guard, for the leaves of a call's arguments.")
      .def(py::init<const py::list&>())
      .def("failing", &ArgumentGuard::failing);
}

} // namespace

static void bind_traces(py::module& m) {
  m.def("storage_serial", &serial_of, "The number of a tensor's storage; 0 if it is not one of ours.");
  m.def(
      "gradient_serials",
      [](const std::vector<at::Tensor>& tensors) {
        std::vector<uint64_t> found;
        for (const at::Tensor& tensor : tensors) {
          found.push_back(tensor.grad().defined() ? serial_of(tensor.grad()) : 0);
        }
        return found;
      },
      "The numbers of the storages of tensors' gradients; 0 for none.");
  m.def(
      "random_position",
      [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)).get<TarryGenerator>()->advance(0); },
      "The seed of a device's generator, and how many seeds were drawn.");
  bind_guards(m);
  py::class_<Trace>(m, "Trace", "While it lives, what is recorded on a device is watched.")
      .def(py::init([](int device) { return std::make_unique<Trace>(device_state(static_cast<c10::DeviceIndex>(device))); }))
      .def_readonly("first_serial", &Trace::first_serial)
      .def(
          "upload_of",
          [](const Trace& trace, const at::Tensor& tensor) -> std::optional<at::Tensor> {
            std::lock_guard<std::mutex> guard(trace.state.mutex);
            const auto found = trace.uploads.find(serial_of(tensor));
            return found == trace.uploads.end() ? std::nullopt : std::make_optional(found->second);
          },
          "The foreign tensor that was copied into the storage of this one last.")
      .def_readonly("shared", &Trace::shared)
      .def_property_readonly("reads", [](const Trace& trace) { return locations(trace.reads); })
      .def_property_readonly("overwritten", [](const Trace& trace) { return locations(trace.overwritten); });
  py::class_<HostReads>(m, "HostReads", "Watches the reads of host tensors by this thread, until stop().")
      .def(py::init<>())
      .def("stop", &HostReads::stop)
      .def_property_readonly("found", [](const HostReads& reads) {
        std::vector<std::pair<at::Tensor, std::pair<std::string, int>>> described;
        for (const auto& [tensor, site] : reads.found) {
          described.emplace_back(tensor, site_location(site));
        }
        return described;
      });
}

static py::list numbers_of(const Snapshot& snapshot) {
  py::list result;
  for (const NodePtr& node : snapshot.batch->order) {
    std::vector<c10::IValue> numbers;
    if (!node->is_leaf()) {
      append_numbers(*node, numbers);
    }
    for (const c10::IValue& number : numbers) {
      const bool is_seed = node->op->has(kRandom) && number.isInt() && number.toInt() == node->constants.back().toInt();
      result.append(is_seed ? py::object(py::none()) : to_python(number));
    }
  }
  return result;
}

static std::vector<std::pair<uint32_t, int64_t>> random_nodes(const Snapshot& snapshot) {
  std::vector<std::pair<uint32_t, int64_t>> found;
  for (uint32_t i = 0; i < snapshot.batch->order.size(); ++i) {
    const Node& node = *snapshot.batch->order[i];
    if (!node.is_leaf() && node.op->has(kRandom) && node.constants.back().toInt() != kNoSeed) {
      found.emplace_back(i, node.constants.back().toInt());
    }
  }
  return found;
}

static void bind_snapshots(py::module& m) {
  py::class_<Snapshot>(m, "Snapshot", "The batch of a traced call, copied before it runs.")
      .def(py::init<const Batch&, Trace&>())
      .def_readonly("whole", &Snapshot::whole)
      .def_property_readonly("batch", [](Snapshot& snapshot) { return snapshot.batch; })
      .def(
          "leaves",
          [](const Snapshot& snapshot) {
            py::list result;
            for (const Trace::Leaf& leaf : snapshot.leaves) {
              const auto [file, line] = site_location(leaf.node->site);
              result.append(
                  py::make_tuple(
                      leaf.serial, leaf.uploaded.defined() ? py::cast(leaf.uploaded) : py::object(py::none()), file, line));
            }
            return result;
          },
          "Per leaf: its storage's number, the host tensor it is a copy of or None, and the line that used it first.")
      .def(
          "forget_uploads",
          [](Snapshot& snapshot) {
            for (Trace::Leaf& leaf : snapshot.leaves) {
              leaf.uploaded.reset();
            }
          })
      .def("numbers", &numbers_of, "The numbers of all nodes, None for seeds.")
      .def("set_numbers", &Snapshot::set_numbers)
      .def(
          "type_hashes",
          [](const Snapshot& snapshot) {
            std::vector<uint64_t> found;
            for (const NodePtr& node : snapshot.batch->order) {
              if (!node->is_leaf()) {
                found.push_back(node->type_hash.lo);
              }
            }
            return found;
          },
          "Per operator: a hash of its arguments' types and constants, and of all switches that decide what it does.")
      .def_readonly("root_serials", &Snapshot::serials)
      .def("root_is_alive", [](const Snapshot& snapshot, size_t i) { return !snapshot.storages.at(i).expired(); })
      .def(
          "root_location", [](const Snapshot& snapshot, size_t i) { return site_location(snapshot.batch->roots.at(i).node->site); })
      .def("random_nodes", &random_nodes, "Positions of the nodes that draw random numbers among all, with their seeds.");
}

void bind_replay(py::module& m) {
  bind_traces(m);
  bind_snapshots(m);
  py::class_<Replay, std::shared_ptr<Replay>>(m, "Replay", "A step that can be made pending again without being recorded.")
      .def(
          py::init(&make_replay), py::kw_only(), py::arg("snapshot"), py::arg("sources"), py::arg("targets"), py::arg("results"),
          py::arg("gradients"), py::arg("holders"), py::arg("hosts"), py::arg("written"), py::arg("kept"), py::arg("seeds"),
          py::arg("draws"), py::arg("numbers"))
      .def(
          "refusal", [](const Replay& replay, const py::list& leaves) { return replay.refusal(tensors_in(leaves)); },
          "Why the step cannot be replayed now, if so.")
      .def("arm", &arm, "The results, pending; or a string that says why the step cannot be replayed now.")
      .def_property_readonly("batch", [](Replay& replay) { return replay.batch(); });
}

} // namespace tarry
