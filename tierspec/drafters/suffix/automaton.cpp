// A suffix automaton over sequences of int32 tokens, cut at a depth: reference.py says what it is and which rules hold.
// Both must give the same bits; tests compare them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <vector>

namespace {

constexpr int32_t kNone = -1;

struct Edge {
  int32_t token;
  int32_t child;
  int32_t next;  // of the same state
};

struct State {
  int32_t link;
  int32_t length;
  int32_t count;
  int32_t likeliest;  // edge of the most frequent next token
  int32_t edges;      // head of the list
};

struct Draft {
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;
  std::vector<double> probabilities;
  double score = 0.0;
  int32_t match_len = 0;
};

struct Limits {
  int32_t max_tokens;
  double min_probability;
  double factor;
  double offset;
};

class Automaton {
 public:
  explicit Automaton(int32_t max_depth) : max_depth_(max_depth), table_(64, kNone) { add(0, kNone, 0); }

  void begin() {
    tail_ = 0;
    context_ = 0;
  }

  void append(int32_t token) {
    const int32_t length = context_ + 1;
    int32_t last = child_of(tail_, token);
    if (last == kNone) {
      last = grow(token, length);
    } else if (states_[last].length > length) {
      last = split(tail_, token, last, length);
    }
    int32_t counted = kNone;
    for (int32_t state = tail_; state != kNone; state = states_[state].link) {
      const int32_t edge = find(state, token);
      const int32_t child = edges_[edge].child;
      if (child != counted) {
        states_[child].count += 1;
        counted = child;
      }
      int32_t& likeliest = states_[state].likeliest;
      if (likeliest == kNone || states_[child].count >= states_[edges_[likeliest].child].count) likeliest = edge;
    }
    const int32_t shorter = states_[last].link;
    const bool full = length == max_depth_;
    tail_ = full && states_[shorter].length == max_depth_ - 1 ? shorter : last;
    context_ = full ? max_depth_ - 1 : length;
  }

  // The state of the longest suffix of `tokens` that occurs, at most max_depth - 1 long, and that length.
  std::pair<int32_t, int32_t> match(const int32_t* tokens, int64_t n) const {
    int32_t state = 0, length = 0;
    for (int64_t i = std::max<int64_t>(0, n - (max_depth_ - 1)); i < n; ++i) {
      int32_t child = child_of(state, tokens[i]);
      while (child == kNone && state != 0) {
        state = states_[state].link;
        length = states_[state].length;
        child = child_of(state, tokens[i]);
      }
      if (child != kNone) {
        state = child;
        ++length;
      }
    }
    return {state, length};
  }

  Draft propose(int32_t state, int32_t top, const Limits& limits, bool tree) const {
    Draft best;
    best.match_len = std::max(top, 0);
    while (top > 0) {
      const int32_t bottom = states_[states_[state].link].length;
      if (tree) {
        for (int32_t p = top; p > bottom; --p) {
          const int32_t size = budget(p, limits);
          if (size <= best.score) continue;
          Draft found = expand(state, size, max_depth_ - p, limits.min_probability);
          if (found.score > best.score) {
            best = std::move(found);
            best.match_len = p;
          }
        }
      } else {
        int32_t longest = 0;
        for (int32_t p = top; p > bottom; --p) longest = std::max(longest, std::min(budget(p, limits), max_depth_ - p));
        if (longest > best.score) {
          const Draft followed = follow(state, longest, limits.min_probability);
          std::vector<double> scores(1, 0.0);
          for (double probability : followed.probabilities) scores.push_back(scores.back() + probability);
          for (int32_t p = top; p > bottom; --p) {
            const int32_t size = std::min({budget(p, limits), max_depth_ - p, int32_t(followed.tokens.size())});
            if (scores[size] > best.score) {
              best.tokens.assign(followed.tokens.begin(), followed.tokens.begin() + size);
              best.probabilities.assign(followed.probabilities.begin(), followed.probabilities.begin() + size);
              best.score = scores[size];
              best.match_len = p;
            }
          }
        }
      }
      state = states_[state].link;
      top = bottom;
    }
    if (!tree)
      for (size_t i = 0; i < best.tokens.size(); ++i) best.parents.push_back(int32_t(i) - 1);
    return best;
  }

  int32_t tail() const { return tail_; }
  int32_t context() const { return context_; }

  int64_t bytes() const {
    return states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + table_.capacity() * sizeof(int32_t) +
           owner_.capacity() * sizeof(int32_t);
  }

 private:
  int32_t budget(int32_t p, const Limits& limits) const {
    const double wanted = std::floor(limits.factor * p + limits.offset + 1e-6);
    return int32_t(std::max(0.0, std::min(double(limits.max_tokens), wanted)));
  }

  Draft follow(int32_t state, int32_t longest, double floor) const {
    Draft draft;
    double probability = 1.0;
    while (int32_t(draft.tokens.size()) < longest && states_[state].likeliest != kNone) {
      const Edge& edge = edges_[states_[state].likeliest];
      probability *= double(states_[edge.child].count) / double(states_[state].count);
      if (probability < floor) break;
      draft.tokens.push_back(edge.token);
      draft.probabilities.push_back(probability);
      state = edge.child;
    }
    return draft;
  }

  Draft expand(int32_t state, int32_t size, int32_t depth, double floor) const {
    struct Candidate {
      double probability;
      int32_t parent, token, state, depth;
      bool operator<(const Candidate& other) const {  // the largest comes first
        if (probability != other.probability) return probability < other.probability;
        if (parent != other.parent) return parent > other.parent;
        return token > other.token;
      }
    };
    Draft draft;
    std::priority_queue<Candidate> waiting;
    const auto offer = [&](int32_t from, double reached, int32_t parent, int32_t at) {
      if (at > depth) return;
      for (int32_t e = states_[from].edges; e != kNone; e = edges_[e].next) {
        const double probability = reached * (double(states_[edges_[e].child].count) / double(states_[from].count));
        if (probability >= floor) waiting.push({probability, parent, edges_[e].token, edges_[e].child, at});
      }
    };
    offer(state, 1.0, -1, 1);
    while (int32_t(draft.tokens.size()) < size && !waiting.empty()) {
      const Candidate taken = waiting.top();
      waiting.pop();
      draft.tokens.push_back(taken.token);
      draft.parents.push_back(taken.parent);
      draft.probabilities.push_back(taken.probability);
      draft.score += taken.probability;
      offer(taken.state, taken.probability, int32_t(draft.tokens.size()) - 1, taken.depth + 1);
    }
    return draft;
  }

  int32_t grow(int32_t token, int32_t length) {
    const int32_t grown = add(length, 0, 0);
    int32_t state = tail_;
    while (state != kNone && find(state, token) == kNone) {
      connect(state, token, grown);
      state = states_[state].link;
    }
    if (state == kNone) return grown;
    const int32_t child = child_of(state, token), wanted = states_[state].length + 1;
    const int32_t link = states_[child].length == wanted ? child : split(state, token, child, wanted);
    states_[grown].link = link;
    return grown;
  }

  // Splits off the substrings of `child` of up to `length` tokens, which `state` and its suffixes reach by `token`.
  int32_t split(int32_t state, int32_t token, int32_t child, int32_t length) {
    const int32_t made = add(length, states_[child].link, states_[child].count);
    std::vector<int32_t> copied;
    for (int32_t e = states_[child].edges; e != kNone; e = edges_[e].next) copied.push_back(e);
    for (auto e = copied.rbegin(); e != copied.rend(); ++e) {
      const int32_t edge = connect(made, edges_[*e].token, edges_[*e].child);
      if (states_[child].likeliest == *e) states_[made].likeliest = edge;
    }
    states_[child].link = made;
    for (int32_t edge; state != kNone && (edge = find(state, token)) != kNone && edges_[edge].child == child;) {
      edges_[edge].child = made;
      state = states_[state].link;
    }
    return made;
  }

  int32_t add(int32_t length, int32_t link, int32_t count) {
    states_.push_back({link, length, count, kNone, kNone});
    return int32_t(states_.size()) - 1;
  }

  int32_t child_of(int32_t state, int32_t token) const {
    const int32_t edge = find(state, token);
    return edge == kNone ? kNone : edges_[edge].child;
  }

  int32_t connect(int32_t state, int32_t token, int32_t child) {
    edges_.push_back({token, child, states_[state].edges});
    owner_.push_back(state);
    const int32_t edge = int32_t(edges_.size()) - 1;
    states_[state].edges = edge;
    if (edges_.size() * 2 > table_.size()) {
      table_.assign(table_.size() * 2, kNone);
      for (int32_t e = 0; e < int32_t(edges_.size()); ++e) place(e);
    } else {
      place(edge);
    }
    return edge;
  }

  void place(int32_t edge) {
    size_t slot = hash(owner_[edge], edges_[edge].token);
    while (table_[slot] != kNone) slot = (slot + 1) & (table_.size() - 1);
    table_[slot] = edge;
  }

  int32_t find(int32_t state, int32_t token) const {
    for (size_t slot = hash(state, token); table_[slot] != kNone; slot = (slot + 1) & (table_.size() - 1)) {
      const int32_t edge = table_[slot];
      if (owner_[edge] == state && edges_[edge].token == token) return edge;
    }
    return kNone;
  }

  size_t hash(int32_t state, int32_t token) const {
    uint64_t key = (uint64_t(uint32_t(state)) << 32) | uint32_t(token);
    key = (key ^ (key >> 31)) * 0x9E3779B97F4A7C15ull;
    return size_t(key >> 20) & (table_.size() - 1);
  }

  int32_t max_depth_;
  int32_t tail_ = 0;
  int32_t context_ = 0;  // length of the tail
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> owner_;  // state of an edge
  std::vector<int32_t> table_;  // open addressing: (state, token) to edge
};

int32_t give(const Draft& draft, int32_t* tokens, int32_t* parents, double* probabilities, double* score,
             int32_t* match_len) {
  std::copy(draft.tokens.begin(), draft.tokens.end(), tokens);
  std::copy(draft.parents.begin(), draft.parents.end(), parents);
  std::copy(draft.probabilities.begin(), draft.probabilities.end(), probabilities);
  *score = draft.score;
  *match_len = draft.match_len;
  return int32_t(draft.tokens.size());
}

}  // namespace

extern "C" {

void* tierspec_suffix_new(int32_t max_depth) { return new Automaton(max_depth); }

void tierspec_suffix_free(void* automaton) { delete static_cast<Automaton*>(automaton); }

void tierspec_suffix_begin(void* automaton) { static_cast<Automaton*>(automaton)->begin(); }

void tierspec_suffix_extend(void* automaton, const int32_t* tokens, int64_t n) {
  for (int64_t i = 0; i < n; ++i) static_cast<Automaton*>(automaton)->append(tokens[i]);
}

int64_t tierspec_suffix_bytes(const void* automaton) { return static_cast<const Automaton*>(automaton)->bytes(); }

// `context` of n tokens is matched; n < 0: the tail of what was appended last. The outputs hold max_tokens each.
int32_t tierspec_suffix_propose(const void* automaton, const int32_t* context, int64_t n, int32_t longest_match,
                                int32_t max_tokens, double min_probability, double factor, double offset, int32_t tree,
                                int32_t* tokens, int32_t* parents, double* probabilities, double* score,
                                int32_t* match_len) {
  const auto* self = static_cast<const Automaton*>(automaton);
  const Limits limits{max_tokens, min_probability, factor, offset};
  std::pair<int32_t, int32_t> at{self->tail(), self->context()};
  if (n >= 0) at = self->match(context, n);
  const int32_t top = std::min(at.second, longest_match);
  return give(self->propose(at.first, top, limits, tree != 0), tokens, parents, probabilities, score, match_len);
}

}
