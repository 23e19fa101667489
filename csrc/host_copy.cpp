// Copies many spans between buffers in one call that holds no interpreter lock.
#include "host_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace py = pybind11;

namespace {

// A buffer held for the length of a call.
class Held {
 public:
  Held(const py::buffer& buffer, int flags) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, flags) != 0) {
      throw py::error_already_set();
    }
  }
  Held(Held&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (view_.obj != nullptr) {
      PyBuffer_Release(&view_);
    }
  }
  char* bytes() const { return static_cast<char*>(view_.buf); }
  std::int64_t size() const { return static_cast<std::int64_t>(view_.len); }
  std::int64_t item() const { return static_cast<std::int64_t>(view_.itemsize); }
  char format() const { return view_.format == nullptr ? 'B' : view_.format[0]; }

 private:
  Py_buffer view_{};
};

struct Span {
  std::int64_t buffer, source, destination, size;
};

std::vector<Held> hold(const py::sequence& buffers, int flags) {
  std::vector<Held> held;
  held.reserve(buffers.size());
  for (const py::handle buffer : buffers) {
    held.emplace_back(py::reinterpret_borrow<py::buffer>(buffer), flags);
  }
  return held;
}

void check(const char* side, std::int64_t offset, const Span& span, const Held& buffer) {
  // Written so that no sum can overflow.
  if (offset < 0 || span.size < 0 || span.size > buffer.size() || offset > buffer.size() - span.size) {
    throw py::index_error(std::to_string(span.size) + " bytes at offset " + std::to_string(offset) + " of " + side +
                          " buffer " + std::to_string(span.buffer) + ", which has " + std::to_string(buffer.size()) +
                          " bytes; nothing was copied.");
  }
}

// The spans with neighbours joined that are neighbours on both sides. Throws before anything is copied.
std::vector<Span> merged(const std::int64_t* rows, std::int64_t count, const std::vector<Held>& sources,
                         const std::vector<Held>& destinations) {
  std::vector<Span> spans;
  spans.reserve(static_cast<std::size_t>(count));
  for (std::int64_t at = 0; at < count; ++at) {
    const Span span{rows[4 * at], rows[4 * at + 1], rows[4 * at + 2], rows[4 * at + 3]};
    if (span.buffer < 0 || span.buffer >= static_cast<std::int64_t>(sources.size())) {
      throw py::index_error("span " + std::to_string(at) + " names buffer " + std::to_string(span.buffer) + " of " +
                            std::to_string(sources.size()) + "; nothing was copied.");
    }
    check("source", span.source, span, sources[span.buffer]);
    check("destination", span.destination, span, destinations[span.buffer]);
    Span* last = spans.empty() ? nullptr : &spans.back();
    if (last != nullptr && last->buffer == span.buffer && last->source + last->size == span.source &&
        last->destination + last->size == span.destination) {
      last->size += span.size;
    } else {
      spans.push_back(span);
    }
  }
  return spans;
}

constexpr std::size_t kLine = 64;
// How far ahead of the copy the source is fetched: a processor's own prefetching ends with each page.
constexpr std::size_t kAhead = 4096;

#if defined(__SSE2__)
// Copies past the caches. What comes `kAhead` bytes later is fetched meanwhile, from `next` after the end.
void copy_streaming(char* to, const char* from, std::size_t size, const char* next, std::size_t next_size) {
  const std::size_t head = std::min(size, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kLine <= size; at += kLine) {
    const std::size_t later = at + kAhead;
    if (later < size) {
      _mm_prefetch(from + later, _MM_HINT_NTA);
    } else if (later - size < next_size) {
      _mm_prefetch(next + (later - size), _MM_HINT_NTA);
    }
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + at, from + at, size - at);
}
#endif

// Copies all spans; `streaming`: in the way that leaves the caches to others, where there is one.
void copy_all(const std::vector<Span>& spans, const std::vector<Held>& from, const std::vector<Held>& to,
              [[maybe_unused]] bool streaming) {
#if defined(__SSE2__)
  if (streaming) {
    for (std::size_t at = 0; at < spans.size(); ++at) {
      const Span& span = spans[at];
      const Span& next = spans[std::min(at + 1, spans.size() - 1)];
      // The translation of an address takes as long as some lines: ask for it in time.
      const Span& later = spans[std::min(at + 2, spans.size() - 1)];
      _mm_prefetch(to[later.buffer].bytes() + later.destination, _MM_HINT_T0);
      _mm_prefetch(from[later.buffer].bytes() + later.source, _MM_HINT_NTA);
      copy_streaming(to[span.buffer].bytes() + span.destination, from[span.buffer].bytes() + span.source,
                     static_cast<std::size_t>(span.size), from[next.buffer].bytes() + next.source,
                     static_cast<std::size_t>(next.size));
    }
    _mm_sfence();
    return;
  }
#endif
  for (const Span& span : spans) {
    std::memcpy(to[span.buffer].bytes() + span.destination, from[span.buffer].bytes() + span.source,
                static_cast<std::size_t>(span.size));
  }
}

std::int64_t copy_spans(const py::sequence& sources, const py::sequence& destinations, const py::buffer& spans,
                        std::int64_t streaming_from) {
  const std::vector<Held> from = hold(sources, PyBUF_C_CONTIGUOUS);
  const std::vector<Held> to = hold(destinations, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
  const Held rows(spans, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
  if (from.size() != to.size()) {
    throw py::value_error(std::to_string(from.size()) + " source buffers and " + std::to_string(to.size()) +
                          " destination buffers; they are copied pair by pair.");
  }
  if (rows.item() != 8 || (rows.format() != 'l' && rows.format() != 'q') || rows.size() % 32 != 0) {
    throw py::value_error("spans is not an int64 array of shape [n, 4].");
  }
  py::gil_scoped_release unlocked;
  const auto* numbers = reinterpret_cast<const std::int64_t*>(rows.bytes());
  const std::vector<Span> joined = merged(numbers, rows.size() / 32, from, to);
  std::int64_t total = 0;
  for (const Span& span : joined) {
    total += span.size;
  }
  copy_all(joined, from, to, total >= streaming_from);
  return total;
}

}  // namespace

void vllm_ext::bind_host_copy(py::module_& module) {
  module.def("copy_spans", &copy_spans, py::arg("sources"), py::arg("destinations"), py::arg("spans"),
             py::arg("streaming_from"),
             "Copy spans (int64 [n, 4]: buffer, source offset, destination offset, bytes) between C-contiguous "
             "buffers, pair by pair, without the interpreter lock; returns the bytes copied. Destinations must not "
             "overlap. A job of at least `streaming_from` bytes goes past the caches. Raises IndexError, and copies "
             "nothing, if a span leaves its buffers.");
}
