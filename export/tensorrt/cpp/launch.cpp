#include "launch.h"

#include <algorithm>
#include <stdexcept>

namespace blockscale {
namespace {

constexpr int kMostSplits = 128;   // MOST_SPLITS in cache_plugin.py
constexpr int kMostRows = 64;      // queries of a KV head for which keys are split: MANY
constexpr int kMostPrograms = 8 * 256;  // that are resident at once on the largest GPU

unsigned ceilDiv(long a, long b) { return static_cast<unsigned>((a + b - 1) / b); }

int rowsOf(CacheAttention const& call) { return call.fresh * (call.heads / call.kvHeads); }

// Splits that fill the GPU, as `decode_tiles_for` in quant/kernels/attention/attention_operands.py chooses them. The lengths are on
// the GPU, so the capacity stands for them; a short sequence leaves splits without keys.
int splitsOf(CacheAttention const& call, int multiprocessors) {
    int const programs = call.batch * call.kvHeads;
    int const resident = call.isNvfp4 ? 8 : 4;
    int const parts = std::max(call.capacity / 128, std::min(2 * multiprocessors / programs, call.capacity / 64));
    return std::clamp(std::min(resident * multiprocessors / programs, parts), 1, kMostSplits);
}

// The smallest tile that holds `rows`, or else the largest there is.
int tileFor(std::vector<int> const& tiles, int rows) {
    if (tiles.empty()) {
        throw std::runtime_error("the engine lacks a kernel of its attention plugin; export it again");
    }
    auto const tile = std::find_if(tiles.begin(), tiles.end(), [rows](int size) { return size >= rows; });
    return tile == tiles.end() ? tiles.back() : *tile;
}

}  // namespace

void attend(LoadedKernels& kernels, DenseAttention const& call, CUstream stream) {
    int const rows = tileFor(kernels.rowsOf("attend"), 0);
    Grid const grid{ceilDiv(call.queries, rows), static_cast<unsigned>(call.heads), static_cast<unsigned>(call.batch)};
    kernels.launch("attend", rows, grid,
        {address("q", call.q), address("k", call.k), address("v", call.v), address("scales", call.scales),
            integer("heads", call.heads), integer("kv_heads", call.kvHeads), integer("seq_q", call.queries),
            integer("seq_kv", call.keys), address("out", call.out)},
        stream);
}

std::size_t workspaceBytes(CacheAttention const& call) {
    int const group = call.heads / call.kvHeads;
    long const fresh = std::min(call.fresh, std::max(kMostRows / group, 1));
    // With more programs than are resident there is one split; a smaller batch than the largest has more splits.
    long const splitsTimesBatch = std::max<long>(
        call.batch, std::min<long>(static_cast<long>(kMostSplits) * call.batch, kMostPrograms / call.kvHeads + 1));
    return static_cast<std::size_t>(splitsTimesBatch) * call.heads * fresh * (call.dim + 1) * sizeof(float);
}

void attend(LoadedKernels& kernels, CacheAttention const& call, CUstream stream) {
    // Each sequence is one page of `capacity` tokens, and the table of pages is 0, 1, 2, …
    void const* const table = kernels.countingNumbers(call.batch);
    void* const kBlocks = call.isNvfp4 ? call.kBlocks : call.kCache;
    void* const vBlocks = call.isNvfp4 ? call.vBlocks : call.vCache;
    // Bytes of a sequence's codes; attention counts them in units of two.
    long const codes = static_cast<long>(call.kvHeads) * call.capacity * (call.isNvfp4 ? call.dim / 2 : call.dim);
    long const blocks = static_cast<long>(call.kvHeads) * call.capacity * (call.dim / 16);
    long const token = call.dim, kHead = token * call.fresh, kBatch = kHead * call.kvHeads;
    int const tokens = tileFor(kernels.rowsOf("write"), call.fresh);
    Grid const written{ceilDiv(call.fresh, tokens), static_cast<unsigned>(call.kvHeads), static_cast<unsigned>(call.batch)};
    kernels.launch("write", tokens, written,
        {address("k", call.k), address("v", call.v), address("k_codes", call.kCache), address("v_codes", call.vCache),
            address("k_scale", call.kScale), address("v_scale", call.vScale), address("k_blocks", kBlocks),
            address("v_blocks", vBlocks), address("table", table), address("first", call.past),
            integer("code_page", codes), integer("block_page", blocks),
            integer("k_batch", kBatch), integer("k_head", kHead), integer("k_token", token), integer("v_batch", kBatch),
            integer("v_head", kHead), integer("v_token", token), integer("table_stride", 1),
            integer("kv_heads", call.kvHeads), integer("new", call.fresh)},
        stream);

    int const rows = rowsOf(call);
    bool const few = rows <= kMostRows;
    int const splits = few ? splitsOf(call, kernels.device().multiprocessors) : 1;
    char const* const role = few ? "split" : "whole";
    int const tile = tileFor(kernels.rowsOf(role), rows);
    long const lines = static_cast<long>(call.batch) * splits * call.heads * call.fresh;
    auto* const parts = static_cast<float*>(call.workspace);
    Grid const attended{
        static_cast<unsigned>(splits) * call.kvHeads * ceilDiv(rows, tile), static_cast<unsigned>(call.batch), 1};
    kernels.launch(role, tile, attended,
        {address("q", call.q), address("k", call.kCache), address("v", call.vCache), address("k_scale", call.kScale),
            address("v_scale", call.vScale), address("k_blocks", kBlocks), address("v_blocks", vBlocks),
            address("table", table), address("lengths", call.lengths), address("out", few ? parts : call.out),
            address("lse", parts + lines * call.dim), integer("code_page", codes / 2), integer("block_page", blocks),
            integer("q_batch", token * call.fresh * call.heads),
            integer("q_head", token * call.fresh), integer("q_new", token), integer("table_stride", 1),
            integer("kv_heads", call.kvHeads), integer("new", call.fresh), integer("splits", splits)},
        stream);
    if (few) {
        int const most = tileFor(kernels.rowsOf("reduce"), splits);
        Grid const reduced{static_cast<unsigned>(call.heads * call.fresh), static_cast<unsigned>(call.batch), 1};
        kernels.launch("reduce", most, reduced,
            {address("parts", parts), address("lses", parts + lines * call.dim), address("out", call.out),
                integer("rows", call.heads * call.fresh), integer("splits", splits)},
            stream);
    }
}

}  // namespace blockscale
