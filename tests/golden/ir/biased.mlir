builtin.module attributes {plait.model = "llama"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: !plait.kv<2x4xbf16> {plait.name = "kv.0"}) -> (tensor<?x32xf32> {plait.name = "logits"}) {
    %2 = plait.weight "model.embed_tokens.weight" : tensor<32x16xbf16>
    %3 = plait.embed %2, %0 : (tensor<32x16xbf16>, !plait.batch) -> tensor<?x16xbf16>
    %4 = plait.weight "model.layers.0.input_layernorm.weight" {block = 0 : i64} : tensor<16xbf16>
    %5 = plait.rms_norm %3, %4 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xbf16>, tensor<16xbf16>) -> tensor<?x16xbf16>
    %6 = plait.weight "model.layers.0.self_attn.q_proj.weight" {block = 0 : i64} : tensor<16x16xbf16>
    %7 = plait.weight "model.layers.0.self_attn.q_proj.bias" {block = 0 : i64} : tensor<16xbf16>
    %8 = plait.linear %5, %6, %7 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<16x16xbf16>, tensor<16xbf16>) -> tensor<?x16xbf16>
    %9 = plait.weight "model.layers.0.self_attn.k_proj.weight" {block = 0 : i64} : tensor<8x16xbf16>
    %10 = plait.weight "model.layers.0.self_attn.k_proj.bias" {block = 0 : i64} : tensor<8xbf16>
    %11 = plait.linear %5, %9, %10 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<8x16xbf16>, tensor<8xbf16>) -> tensor<?x8xbf16>
    %12 = plait.weight "model.layers.0.self_attn.v_proj.weight" {block = 0 : i64} : tensor<8x16xbf16>
    %13 = plait.weight "model.layers.0.self_attn.v_proj.bias" {block = 0 : i64} : tensor<8xbf16>
    %14 = plait.linear %5, %12, %13 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<8x16xbf16>, tensor<8xbf16>) -> tensor<?x8xbf16>
    %15 = plait.rope %8, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x16xbf16>, !plait.batch) -> tensor<?x16xbf16>
    %16 = plait.rope %11, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x8xbf16>, !plait.batch) -> tensor<?x8xbf16>
    %17 = plait.attention %15, %16, %14, %1, %0 {heads = 4 : i64, scale = 5.000000e-01 : f64, block = 0 : i64} : (tensor<?x16xbf16>, tensor<?x8xbf16>, tensor<?x8xbf16>, !plait.kv<2x4xbf16>, !plait.batch) -> tensor<?x16xbf16>
    %18 = plait.weight "model.layers.0.self_attn.o_proj.weight" {block = 0 : i64} : tensor<16x16xbf16>
    %19 = plait.linear %17, %18 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<16x16xbf16>) -> tensor<?x16xbf16>
    %20 = plait.add %3, %19 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<?x16xbf16>) -> tensor<?x16xbf16>
    %21 = plait.weight "model.layers.0.post_attention_layernorm.weight" {block = 0 : i64} : tensor<16xbf16>
    %22 = plait.rms_norm %20, %21 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xbf16>, tensor<16xbf16>) -> tensor<?x16xbf16>
    %23 = plait.weight "model.layers.0.mlp.gate_proj.weight" {block = 0 : i64} : tensor<24x16xbf16>
    %24 = plait.linear %22, %23 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<24x16xbf16>) -> tensor<?x24xbf16>
    %25 = plait.weight "model.layers.0.mlp.up_proj.weight" {block = 0 : i64} : tensor<24x16xbf16>
    %26 = plait.linear %22, %25 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<24x16xbf16>) -> tensor<?x24xbf16>
    %27 = plait.silu_mul %24, %26 {block = 0 : i64} : (tensor<?x24xbf16>, tensor<?x24xbf16>) -> tensor<?x24xbf16>
    %28 = plait.weight "model.layers.0.mlp.down_proj.weight" {block = 0 : i64} : tensor<16x24xbf16>
    %29 = plait.linear %27, %28 {block = 0 : i64} : (tensor<?x24xbf16>, tensor<16x24xbf16>) -> tensor<?x16xbf16>
    %30 = plait.add %20, %29 {block = 0 : i64} : (tensor<?x16xbf16>, tensor<?x16xbf16>) -> tensor<?x16xbf16>
    %31 = plait.weight "model.norm.weight" : tensor<16xbf16>
    %32 = plait.rms_norm %30, %31 {eps = 1.000000e-05 : f64} : (tensor<?x16xbf16>, tensor<16xbf16>) -> tensor<?x16xbf16>
    %33 = plait.weight "lm_head.weight" : tensor<32x16xbf16>
    %34 = plait.logits %32, %33, %0 : (tensor<?x16xbf16>, tensor<32x16xbf16>, !plait.batch) -> tensor<?x32xf32>
    func.return %34 : tensor<?x32xf32>
  }
}
