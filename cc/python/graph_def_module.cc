// Python module `_graph_def`: reads what the remapper asks of every op of a
// graph from its GraphDef, in a fraction of the time that asking the ops takes.

#include <pybind11/pybind11.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;

// Fields of graph.proto and of node_def.proto.
constexpr std::uint64_t kNode = 1;
constexpr std::uint64_t kName = 1;
constexpr std::uint64_t kType = 2;
constexpr std::uint64_t kInput = 3;

// What is larger, constants that is, would only be copied to be kept.
constexpr std::size_t kMaxShared = 1 << 14;

struct Node {
  std::string_view name;
  std::string_view type;
  std::vector<std::string_view> inputs;
  // What else there is: device and attributes, still serialized.
  std::string_view rest;
};

[[noreturn]] void Damaged() {
  throw py::value_error("the GraphDef is damaged");
}

// Goes through the fields of a serialized message that are strings or messages.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message), left_(message) {}

  // Goes to the next field; returns whether there is one.
  bool Next() {
    constexpr std::uint64_t kTypeBits = 3, kLengthDelimited = 2;
    rest_ = left_;
    if (left_.empty()) return false;
    const std::uint64_t tag = Varint();
    if ((tag & ((1 << kTypeBits) - 1)) != kLengthDelimited) Damaged();
    number_ = tag >> kTypeBits;
    const std::uint64_t size = Varint();
    if (size > left_.size()) Damaged();
    value_ = left_.substr(0, size);
    left_.remove_prefix(size);
    return true;
  }

  std::uint64_t number() const { return number_; }
  std::string_view value() const { return value_; }
  // This field and those after it.
  std::string_view rest() const { return rest_; }

 private:
  // Seven bits a byte, the lowest first; the eighth says that there are more.
  std::uint64_t Varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64 && !left_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(left_.front());
      left_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    Damaged();
  }

  std::string_view rest_;
  std::string_view left_;
  std::uint64_t number_ = 0;
  std::string_view value_;
};

Node ReadNode(std::string_view serialized) {
  Node node;
  for (Fields fields(serialized); fields.Next();) {
    switch (fields.number()) {
      case kName:
        node.name = fields.value();
        break;
      case kType:
        node.type = fields.value();
        break;
      case kInput:
        node.inputs.push_back(fields.value());
        break;
      default:
        // Fields are in the order of their numbers.
        node.rest = fields.rest();
        return node;
    }
  }
  return node;
}

// Python objects made from equal strings, each once.
template <typename T>
class Shared {
 public:
  py::object operator()(std::string_view text) {
    py::object& object = objects_[text];
    if (!object) object = T(text.data(), text.size());
    return object;
  }

 private:
  std::unordered_map<std::string_view, py::object> objects_;
};

// An input as a NodeDef names it: "node", "node:port" or "^node".
struct Input {
  explicit Input(std::string_view text)
      : node(text), control(text.substr(0, 1) == "^") {
    if (control) node.remove_prefix(1);
    const auto colon = node.rfind(':');
    if (control || colon == std::string_view::npos) return;
    const std::string_view digits = node.substr(colon + 1);
    std::from_chars(digits.data(), digits.data() + digits.size(), port);
    node = node.substr(0, colon);
  }

  std::string_view node;
  bool control;
  int port = 0;
};

// The ops that a graph holds, by the names of their nodes.
class Ops {
 public:
  Ops(const std::vector<Node>& nodes, const py::list& ops) {
    places_.reserve(nodes.size());
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const py::object op = ops[i];
      places_.emplace(nodes[i].name, Place{op, op.attr("outputs")});
    }
  }

  // Returns the tensors that a node reads, and the ops that it waits for, those
  // that make the tensors first.
  std::pair<py::tuple, py::list> Before(const Node& node) const {
    const std::size_t size = node.inputs.size();
    std::vector<py::object> tensors;
    tensors.reserve(size);
    py::list before(size);
    for (std::size_t i = 0; i < size; ++i) {
      const Input input(node.inputs[i]);
      const auto found = places_.find(input.node);
      if (found == places_.end()) Damaged();
      const Place& place = found->second;
      if (!input.control) tensors.push_back(place.outputs[input.port]);
      PyList_SET_ITEM(before.ptr(), i, place.op.inc_ref().ptr());
    }
    py::tuple inputs(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      PyTuple_SET_ITEM(inputs.ptr(), i, tensors[i].release().ptr());
    }
    return {std::move(inputs), std::move(before)};
  }

 private:
  struct Place {
    py::object op;
    py::list outputs;
  };
  std::unordered_map<std::string_view, Place> places_;
};

py::tuple Read(std::string_view graph_def, const py::list& ops) {
  std::vector<Node> nodes;
  nodes.reserve(ops.size());
  for (Fields fields(graph_def); fields.Next() && fields.number() == kNode;) {
    nodes.push_back(ReadNode(fields.value()));
  }
  if (nodes.size() != ops.size()) {
    throw py::value_error("graph_def has " + std::to_string(nodes.size()) +
                          " nodes, not the " + std::to_string(ops.size()) +
                          " of ops");
  }
  const Ops known(nodes, ops);
  Shared<py::str> types;
  Shared<py::bytes> rests;
  py::dict all_types, all_inputs, all_before, all_rests;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const py::object op = ops[i];
    auto [inputs, before] = known.Before(nodes[i]);
    const std::string_view rest = nodes[i].rest;
    all_types[op] = types(nodes[i].type);
    all_inputs[op] = std::move(inputs);
    all_before[op] = std::move(before);
    all_rests[op] = rest.size() > kMaxShared ? py::none() : rests(rest);
  }
  return py::make_tuple(std::move(all_types), std::move(all_inputs),
                        std::move(all_before), std::move(all_rests));
}

py::bytes Anonymous(std::string_view node_def) {
  const std::string_view rest = ReadNode(node_def).rest;
  return py::bytes(rest.data(), rest.size());
}

}  // namespace

PYBIND11_MODULE(_graph_def, m) {
  m.doc() = "Reads serialized GraphDefs.";
  m.def("read", &Read, py::arg("graph_def"), py::arg("ops"),
        "Reads a graph from its GraphDef and the ops of its nodes, in their "
        "order. Returns dicts, in that order, of: its type; a tuple of the "
        "tensors that it reads; a list of the ops that make these, then of "
        "those that it waits for; what `anonymous` returns, the same object "
        "for equal bytes, or None where it is large.");
  m.def("anonymous", &Anonymous, py::arg("node_def"),
        "Returns a serialized NodeDef without its name, its type and its "
        "inputs.");
}
