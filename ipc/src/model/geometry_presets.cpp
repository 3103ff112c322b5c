// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "model/geometry_plan.hpp"

#include <array>
#include <utility>

namespace kvferry::ipc {
namespace {

using model::GeometryPlan;
using model::GroupPlan;
using model::KeyValuePlan;
using model::LayersPlan;
using model::PlainPlan;

LayersPlan key_value(std::uint32_t first_layer,
                     std::uint32_t layers,
                     DataType dtype,
                     KeyValuePlan plan) {
  LayersPlan result;
  result.first_layer = first_layer;
  result.layers = layers;
  result.dtype = dtype;
  result.key_value = plan;
  return result;
}

LayersPlan plain(std::uint32_t first_layer, std::uint32_t layers, DataType dtype, PlainPlan plan) {
  LayersPlan result;
  result.first_layer = first_layer;
  result.layers = layers;
  result.dtype = dtype;
  result.plain = plan;
  return result;
}

GroupPlan group(std::string name, LayersPlan layers) {
  GroupPlan result;
  result.name = std::move(name);
  result.layers.push_back(std::move(layers));
  return result;
}

GeometryPlan geometry(std::uint32_t tokens_per_block, std::vector<GroupPlan> groups) {
  GeometryPlan result;
  result.tokens_per_block = tokens_per_block;
  result.groups = std::move(groups);
  return result;
}

// 16 tokens per block: vLLM's CacheConfig.DEFAULT_BLOCK_SIZE. 64: the page size of FlashMLA's paged
// cache. K and V hold num_key_value_heads * head_dim elements per token and layer; head_dim is
// hidden_size / num_attention_heads where a config.json does not name it.

GeometryPlan llama_3_8b() {
  // num_hidden_layers 32, num_key_value_heads 8, hidden_size 4096 / num_attention_heads 32.
  return geometry(16, {group("main", key_value(0, 32, DataType::kBf16, {8, 128, {}}))});
}

GeometryPlan llama_3_70b() {
  // num_hidden_layers 80, num_key_value_heads 8, hidden_size 8192 / num_attention_heads 64.
  return geometry(16, {group("main", key_value(0, 80, DataType::kBf16, {8, 128, {}}))});
}

GeometryPlan deepseek_v3() {
  // num_hidden_layers 61, kv_lora_rank 512 + qk_rope_head_dim 64. Attention is absorbed into the
  // latent, which has no head dimension: every rank holds the same bytes.
  return geometry(
      64, {group("main", plain(0, 61, DataType::kBf16, {RegionKind::kLatent, true, 512 + 64, 0}))});
}

GeometryPlan qwen3_30b_a3b() {
  // num_hidden_layers 48, num_key_value_heads 4, head_dim 128.
  return geometry(16, {group("main", key_value(0, 48, DataType::kBf16, {4, 128, {}}))});
}

GeometryPlan tiny() {
  return geometry(16, {group("main", key_value(0, 4, DataType::kFp16, {4, 32, {}}))});
}

GeometryPlan tiny_mla() {
  // Beside the latent, indexer keys of 128 bytes and a 4-byte scale, as sparse attention keeps
  // them.
  GroupPlan main =
      group("main", plain(0, 4, DataType::kBf16, {RegionKind::kLatent, true, 128 + 32, 0}));
  main.layers.push_back(plain(0, 4, DataType::kUint8, {RegionKind::kIndexer, true, 132, 0}));
  return geometry(16, {std::move(main)});
}

GeometryPlan tiny_fp8() {
  return geometry(16,
                  {group("main", key_value(0, 4, DataType::kFp8E4m3, {4, 32, DataType::kFp32}))});
}

GeometryPlan tiny_draft() {
  GroupPlan draft = group("draft", key_value(4, 1, DataType::kFp16, {4, 32, {}}));
  draft.blocks_percent = 150;
  return geometry(16,
                  {group("main", key_value(0, 4, DataType::kFp16, {4, 32, {}})), std::move(draft)});
}

GeometryPlan tiny_window() {
  GroupPlan window = group("window", key_value(2, 2, DataType::kFp16, {4, 32, {}}));
  window.rule = HitRule::kSlidingWindow;
  window.window_blocks = 4;
  return geometry(
      16, {group("main", key_value(0, 2, DataType::kFp16, {4, 32, {}})), std::move(window)});
}

GeometryPlan tiny_state() {
  GroupPlan state =
      group("state", plain(2, 2, DataType::kFp32, {RegionKind::kState, false, 0, 16384}));
  state.rule = HitRule::kLastState;
  state.blocks_percent = 50;
  return geometry(16,
                  {group("main", key_value(0, 2, DataType::kFp16, {4, 32, {}})), std::move(state)});
}

struct Preset {
  PresetInfo info;
  GeometryPlan (*make)() = nullptr;
};

constexpr std::array kPresets = {
    Preset{{"llama-3-8b",
            "32 layers, 8 KV heads of 128, bf16, 16 tokens: config.json of meta-llama/"
            "Meta-Llama-3-8B (num_hidden_layers, num_key_value_heads, hidden_size)",
            1},
           llama_3_8b},
    Preset{{"llama-3-70b",
            "80 layers, 8 KV heads of 128, bf16, 16 tokens: config.json of meta-llama/"
            "Meta-Llama-3-70B (num_hidden_layers, num_key_value_heads, hidden_size)",
            4},
           llama_3_70b},
    Preset{{"deepseek-v3",
            "61 layers, MLA latent of 512 + 64 on every rank, bf16, 64 tokens: config.json of "
            "deepseek-ai/DeepSeek-V3 (num_hidden_layers, kv_lora_rank, qk_rope_head_dim)",
            8},
           deepseek_v3},
    Preset{{"qwen3-30b-a3b",
            "48 layers, 4 KV heads of 128, bf16, 16 tokens: config.json of Qwen/Qwen3-30B-A3B "
            "(num_hidden_layers, num_key_value_heads, head_dim)",
            1},
           qwen3_30b_a3b},
    Preset{{"tiny", "4 layers, 4 KV heads of 32, fp16, 16 tokens: made up, for tests and demos", 1},
           tiny},
    Preset{{"tiny-mla", "4 layers, latent of 160 and indexer keys on every rank: made up", 2},
           tiny_mla},
    Preset{{"tiny-fp8", "tiny with fp8 keys and values and 512 bytes of scales: made up", 1},
           tiny_fp8},
    Preset{{"tiny-draft", "tiny and a draft layer with 150 % of the blocks: made up", 1},
           tiny_draft},
    Preset{{"tiny-window", "2 layers of full attention, 2 with a window of 4 blocks: made up", 1},
           tiny_window},
    Preset{{"tiny-state", "2 layers of attention, 2 recurrent ones with a state: made up", 1},
           tiny_state},
};

}  // namespace

std::vector<PresetInfo> geometry_presets() {
  std::vector<PresetInfo> infos;
  infos.reserve(kPresets.size());
  for (const Preset& preset : kPresets) infos.push_back(preset.info);
  return infos;
}

std::optional<GeometryPlan> model::find_preset(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.info.name != name) continue;
    GeometryPlan plan = preset.make();
    plan.name = name;
    for (GroupPlan& group : plan.groups) {
      for (LayersPlan& layers : group.layers) {
        layers.origin = fmt::format("geometry '{}', group '{}'", name, group.name);
      }
    }
    return plan;
  }
  return std::nullopt;
}

Result<Geometry> load_geometry(std::string_view name_or_file, std::uint32_t ranks) {
  if (name_or_file.ends_with(".toml")) {
    KVFERRY_ASSIGN(const GeometryPlan plan, model::read_geometry_file(name_or_file));
    return model::shard(plan, ranks);
  }
  const std::optional<GeometryPlan> plan = model::find_preset(name_or_file);
  if (!plan) {
    std::string known;
    for (const Preset& preset : kPresets) {
      known += fmt::format("{}{}", known.empty() ? "" : ", ", preset.info.name);
    }
    return KVFERRY_ERROR(kNotFound,
                         "geometry '{}' is unknown; use one of {}, or a file that ends in .toml",
                         name_or_file, known);
  }
  return model::shard(*plan, ranks);
}

}  // namespace kvferry::ipc
