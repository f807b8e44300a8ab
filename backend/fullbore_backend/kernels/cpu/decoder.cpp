// A step of a Llama-like decoder on int8 weights, from token ids to logits, as one call.
//
// All threads run run_step from its beginning to its end. Between barriers a phase's work is shared
// out by rank alone, or by a counter where pieces differ in size; either way each number is computed
// by one thread in one order, so that results do not depend on how many threads there are.
#include "attention.h"
#include "gemm.h"
#include "team.h"

#include <cstdlib>
#include <new>

namespace fullbore {

struct Layer {
  const float* attention_norm;
  const float* mlp_norm;
  const float* q_norm;  // (dim,) or null, as k_norm
  const float* k_norm;
  Weight qkv, out, gate_up, down;  // gate_up: 16 rows of gate, then the 16 of up, in each panel
  int32_t window;                  // 0 is none
};

struct Model {
  int32_t hidden, intermediate, heads, kv_heads, dim, pairs, layers, vocab;
  float eps, scale;
  const float* norm;
  const float* cosines;  // (positions, pairs), as sines
  const float* sines;
  const Layer* layer;
  Weight head;
  const uint16_t* embedding;  // (vocab, hidden) bf16, or null: it is the head
};

struct Step {
  int32_t tokens, rows, sequences, table_stride, block_size, stored, max_context;
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* sampled;  // (rows,), the tokens whose logits are wanted
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_table;
  const Pages* pages;
  float* logits;  // (rows, vocab)
};

constexpr int QUERY_TILE = 32;  // new tokens of a work item of attention

template <class Number>
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  Number* take(size_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = count + count / 4;
      data_ = static_cast<Number*>(std::aligned_alloc(64, (size_ * sizeof(Number) + 63) / 64 * 64));
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  Number* data_ = nullptr;
  size_t size_ = 0;
};

struct Item {
  int32_t sequence, kv_head, first, last;  // tokens of the step
};

class Runner {
 public:
  explicit Runner(int threads) : team_(threads), scratch_(threads) {}

  void run(const Model& model, const Step& step) {
    m_ = &model;
    s_ = &step;
    const size_t n = step.tokens, width = size_t(model.heads + 2 * model.kv_heads) * model.dim;
    const int most = std::max({model.layer[0].qkv.inputs, model.layer[0].out.inputs,
                               model.layer[0].down.inputs});
    x_ = x_buffer_.take(n * model.hidden);
    qkv_ = qkv_buffer_.take(n * std::max<size_t>(width, model.layer[0].qkv.rows));
    mixed_ = mixed_buffer_.take(n * std::max(model.heads * model.dim, model.intermediate + PANEL));
    q_ = {codes_.take(n * most), scales_.take(n * most / GROUP), sums_.take(n * most / GROUP)};
    const size_t context = (step.max_context + LANES - 1) / LANES * LANES;
    for (auto& scratch : scratch_) scratch.take(context * (4 + 2 * model.dim) + 64);
    slots_ = slots_buffer_.take(size_t(step.sequences) * step.max_context);
    plan();
    team_.run([](void* self, int rank) { static_cast<Runner*>(self)->work(rank); }, this);
  }

 private:
  void plan() {
    items_.clear();
    for (int sequence = 0; sequence < s_->sequences; sequence++) {
      const int begin = s_->query_starts[sequence], end = s_->query_starts[sequence + 1];
      for (int first = begin; first < end; first += QUERY_TILE)
        for (int head = 0; head < m_->kv_heads; head++)
          items_.push_back({sequence, head, first, std::min(first + QUERY_TILE, end)});
    }
    // The longest first, so that the last to be taken are short.
    std::stable_sort(items_.begin(), items_.end(), [this](const Item& a, const Item& b) {
      return cost(a) > cost(b);
    });
  }

  int64_t cost(const Item& item) const {
    return int64_t(item.last - item.first) * s_->context_lens[item.sequence];
  }

  void work(int rank) {
    const Model& m = *m_;
    embed(rank);
    for (int number = 0; number < m.layers; number++) {
      const Layer& layer = m.layer[number];
      normalise(layer.attention_norm, layer.qkv, rank);
      team_.barrier();
      const int qkv_rows = layer.qkv.rows;
      product(layer.qkv, q_, s_->tokens, rank, team_.size(),
              [&](int token, int row, f32x16 low, f32x16 high) {
                float* to = qkv_ + size_t(token) * qkv_rows + row;
                store(to, low);
                store(to + LANES, high);
              });
      team_.barrier();
      rotate_and_store(layer, s_->pages[number], rank);
      if (rank == 0) next_.store(0, std::memory_order_relaxed);
      team_.barrier();
      attend(layer, s_->pages[number], rank);
      team_.barrier();
      quantize(mixed_, m.heads * m.dim, m.heads * m.dim, layer.out, rank);
      team_.barrier();
      add_product(layer.out, rank);
      team_.barrier();
      normalise(layer.mlp_norm, layer.gate_up, rank);
      team_.barrier();
      const int inner = layer.gate_up.rows / 2;
      product(layer.gate_up, q_, s_->tokens, rank, team_.size(),
              [&](int token, int row, f32x16 gate, f32x16 up) {
                const f32x16 silu = gate / (exp(-gate) + 1.0f);
                store(mixed_ + size_t(token) * inner + row / 2, silu * up);
              });
      team_.barrier();
      quantize(mixed_, inner, m.intermediate, layer.down, rank);
      team_.barrier();
      add_product(layer.down, rank);
      team_.barrier();
    }
    finish(rank);
  }

  void embed(int rank) {
    const Share sequences(s_->sequences, rank, team_.size());
    for (int i = sequences.begin; i < sequences.end; i++)
      find_slots(s_->block_table + size_t(i) * s_->table_stride, s_->block_size,
                 s_->context_lens[i], slots_ + size_t(i) * s_->max_context);
    const Share mine(s_->tokens, rank, team_.size());
    for (int token = mine.begin; token < mine.end; token++) {
      float* to = x_ + size_t(token) * m_->hidden;
      const int64_t id = s_->token_ids[token];
      if (m_->embedding) {
        for (int i = 0; i < m_->hidden; i += LANES)
          store(to + i, load_bf16(m_->embedding + id * m_->hidden + i));
      } else {
        read_row(m_->head, int(id), m_->hidden, to);
      }
    }
  }

  // A row of a weight, in fp32.
  static void read_row(const Weight& w, int row, int size, float* to) {
    const uint8_t* panel = w.panel(row / PANEL);
    const int lane = row % PANEL;
    for (int at = 0; at < size; at++) {
      const uint8_t* group = panel + size_t(at / GROUP) * GROUP_BYTES;
      const uint32_t scale = uint32_t(reinterpret_cast<const uint16_t*>(group)[lane]) << 16;
      float wide;
      std::memcpy(&wide, &scale, sizeof wide);
      const int in = at % GROUP;
      const size_t place = (in / 4 * 2 + lane / LANES) * 64 + lane % LANES * 4 + in % 4;
      to[at] = (int(group[PANEL * 2 + place]) - 128) * wide;
    }
  }

  // RMS norm of every token of x, quantised for a product.
  void normalise(const float* weight, const Weight& next, int rank) {
    const Share mine(s_->tokens, rank, team_.size());
    for (int token = mine.begin; token < mine.end; token++)
      normalise_token(x_ + size_t(token) * m_->hidden, weight, token, next);
  }

  void normalise_token(const float* x, const float* weight, int token, const Weight& next) {
    const int hidden = m_->hidden, groups = next.groups();
    f32x16 squares{};
    for (int i = 0; i < hidden; i += LANES) {
      const f32x16 v = load_f32(x + i);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / hidden + m_->eps);
    for (int group = 0; group < groups; group++) {
      f32x16 part[GROUP / LANES];
      for (int i = 0; i < GROUP / LANES; i++) {
        const int at = group * GROUP + i * LANES;
        part[i] = at < hidden ? load_f32(x + at) * scale * load_f32(weight + at) : f32x16{};
      }
      const size_t place = size_t(token) * groups + group;
      quantize_group(part, q_.codes + place * GROUP, q_.scales + place, q_.sums + place);
    }
  }

  void quantize(const float* from, int stride, int size, const Weight& next, int rank) {
    const Share mine(s_->tokens, rank, team_.size());
    for (int token = mine.begin; token < mine.end; token++)
      quantize_token(from + size_t(token) * stride, size, token, next.groups(), q_);
  }

  // x += product: hidden is a multiple of 16, and the rows beyond it are zeros that are not added.
  void add_product(const Weight& w, int rank) {
    const int hidden = m_->hidden;
    product(w, q_, s_->tokens, rank, team_.size(),
            [&](int token, int row, f32x16 low, f32x16 high) {
              float* to = x_ + size_t(token) * hidden + row;
              store(to, load_f32(to) + low);
              if (row + LANES < hidden) store(to + LANES, load_f32(to + LANES) + high);
            });
  }

  void rotate_and_store(const Layer& layer, const Pages& pages, int rank) {
    const Shape shape = this->shape();
    const int heads = m_->heads, kv_heads = m_->kv_heads, dim = m_->dim;
    const Share mine(s_->tokens, rank, team_.size());
    for (int token = mine.begin; token < mine.end; token++) {
      float* head = qkv_ + size_t(token) * layer.qkv.rows;
      const int64_t position = s_->positions[token], slot = s_->slots[token];
      for (int h = 0; h < heads + kv_heads; h++, head += dim) {
        rotate(head, h < heads ? layer.q_norm : layer.k_norm, position);
        if (h >= heads && slot >= 0)
          store_head(head, shape, pages.k, pages.k_scale, slot, h - heads);
      }
      for (int h = 0; slot >= 0 && h < kv_heads; h++)
        store_head(head + size_t(h) * dim, shape, pages.v, pages.v_scale, slot, h);
    }
  }

  void rotate(float* head, const float* norm, int64_t position) const {
    const int dim = m_->dim, pairs = m_->pairs;
    if (norm) {
      f32x16 squares{};
      for (int i = 0; i < dim; i += LANES) squares += load_f32(head + i) * load_f32(head + i);
      const float scale = 1.0f / std::sqrt(sum(squares) / dim + m_->eps);
      for (int i = 0; i < dim; i += LANES)
        store(head + i, load_f32(head + i) * scale * load_f32(norm + i));
    }
    const float* cosine = m_->cosines + position * pairs;
    const float* sine = m_->sines + position * pairs;
    for (int i = 0; i < pairs; i++) {
      const float low = head[i], high = head[i + pairs];
      head[i] = low * cosine[i] - high * sine[i];
      head[i + pairs] = high * cosine[i] + low * sine[i];
    }
  }

  Shape shape() const {
    return {m_->heads, m_->kv_heads, m_->dim, s_->block_size, Stored(s_->stored), m_->scale};
  }

  void attend(const Layer& layer, const Pages& pages, int rank) {
    switch (Stored(s_->stored)) {
      case Stored::f32: return attend_stored<Stored::f32>(layer, pages, rank);
      case Stored::bf16: return attend_stored<Stored::bf16>(layer, pages, rank);
      case Stored::i8: return attend_stored<Stored::i8>(layer, pages, rank);
    }
  }

  template <Stored KIND>
  void attend_stored(const Layer& layer, const Pages& pages, int rank) {
    switch (m_->dim / LANES) {
      case 1: return attend_dim<1, KIND>(layer, pages, rank);
      case 2: return attend_dim<2, KIND>(layer, pages, rank);
      case 4: return attend_dim<4, KIND>(layer, pages, rank);
      case 5: return attend_dim<5, KIND>(layer, pages, rank);
      case 6: return attend_dim<6, KIND>(layer, pages, rank);
      case 8: return attend_dim<8, KIND>(layer, pages, rank);
      case 16: return attend_dim<16, KIND>(layer, pages, rank);
    }
  }

  template <int D, Stored KIND>
  void attend_dim(const Layer& layer, const Pages& pages, int rank) {
    const Shape shape = this->shape();
    const int group = m_->heads / m_->kv_heads, dim = m_->dim, width = m_->heads * dim;
    float* scratch = scratch_[rank].take(0);
    for (;;) {
      const int taken = next_.fetch_add(1, std::memory_order_relaxed);
      if (taken >= int(items_.size())) return;
      const Item& item = items_[taken];
      const int context = s_->context_lens[item.sequence];
      const int ends = s_->query_starts[item.sequence + 1];
      // The last token of a sequence's new ones sees all of its context.
      const auto end_of = [&](int token) { return context - (ends - 1 - token); };
      const auto begin_of = [&](int token) {
        return layer.window ? std::max(0, end_of(token) - layer.window) : 0;
      };
      const int32_t* slots = slots_ + size_t(item.sequence) * s_->max_context;
      const int first_head = item.kv_head * group;
      if (item.last - item.first == 1) {
        const Context c{slots, begin_of(item.first), end_of(item.first)};
        const float* query = qkv_ + size_t(item.first) * layer.qkv.rows + first_head * dim;
        decode<D, KIND>(query, shape, pages, c, item.kv_head, scratch,
                        mixed_ + size_t(item.first) * width + first_head * dim);
        continue;
      }
      const Context c{slots, begin_of(item.first), end_of(item.last - 1)};
      const int stride = (c.end - c.begin + LANES - 1) / LANES * LANES;
      Gathered gathered{scratch + 4 * size_t(stride), nullptr};
      gathered.values = gathered.keys + size_t(stride) * dim;
      gather<KIND>(shape, pages, c, item.kv_head, gathered);
      const int rows = (item.last - item.first) * group;
      for (int row = 0; row < rows; row += 4) {
        const float* query[4];
        float* out[4];
        int from[4], to[4];
        const int count = std::min(4, rows - row);
        for (int r = 0; r < 4; r++) {
          const int at = row + std::min(r, count - 1);  // the last again, where there are fewer
          const int token = item.first + at / group, head = first_head + at % group;
          query[r] = qkv_ + size_t(token) * layer.qkv.rows + head * dim;
          out[r] = mixed_ + size_t(token) * width + head * dim;
          from[r] = begin_of(token) - c.begin;
          to[r] = end_of(token) - c.begin;
        }
        attend_rows<D, 4>(query, out, from, to, shape, gathered, scratch, stride);
      }
    }
  }

  // The final norm and the head, of the sampled tokens alone.
  void finish(int rank) {
    const Share mine(s_->rows, rank, team_.size());
    for (int row = mine.begin; row < mine.end; row++)
      normalise_token(x_ + size_t(s_->sampled[row]) * m_->hidden, m_->norm, row, m_->head);
    team_.barrier();
    const int vocab = m_->vocab;
    product(m_->head, q_, s_->rows, rank, team_.size(),
            [&](int row, int token, f32x16 low, f32x16 high) {
              float* to = s_->logits + size_t(row) * vocab + token;
              if (token + PANEL <= vocab) {
                store(to, low);
                store(to + LANES, high);
              } else {
                for (int i = 0; i < PANEL && token + i < vocab; i++)
                  to[i] = i < LANES ? low[i] : high[i - LANES];
              }
            });
  }

  Team team_;
  const Model* m_ = nullptr;
  const Step* s_ = nullptr;
  Buffer<float> x_buffer_, qkv_buffer_, mixed_buffer_, scales_;
  Buffer<int8_t> codes_;
  Buffer<int32_t> sums_, slots_buffer_;
  std::vector<Buffer<float>> scratch_;
  std::vector<Item> items_;
  std::atomic<int> next_{0};
  float *x_ = nullptr, *qkv_ = nullptr, *mixed_ = nullptr;
  int32_t* slots_ = nullptr;  // (sequences, max_context), where each token of a context is
  Quantized q_{};
};

}  // namespace fullbore

extern "C" {

void* fullbore_open(int threads) { return new (std::nothrow) fullbore::Runner(threads); }

void fullbore_close(void* runner) { delete static_cast<fullbore::Runner*>(runner); }

// 0, or 1 when memory ran out: then nothing but scratch has changed.
int fullbore_step(void* runner, const fullbore::Model* model, const fullbore::Step* step) {
  try {
    static_cast<fullbore::Runner*>(runner)->run(*model, *step);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}
