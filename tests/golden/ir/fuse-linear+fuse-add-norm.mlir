builtin.module attributes {plait.model = "llama"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: !plait.kv<2x4xf32> {plait.name = "kv.0"}) -> (tensor<?x32xf32> {plait.name = "logits"}) {
    %2 = plait.weight "model.embed_tokens.weight" : tensor<32x16xf32>
    %3 = plait.embed %2, %0 : (tensor<32x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %4 = plait.weight "model.layers.0.input_layernorm.weight" {block = 0 : i64} : tensor<16xf32>
    %5 = plait.rms_norm %3, %4 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %6 = plait.weight "model.layers.0.self_attn.q_proj.weight" {block = 0 : i64} : tensor<16x16xf32>
    %7 = plait.weight "model.layers.0.self_attn.q_proj.bias" {block = 0 : i64} : tensor<16xf32>
    %8 = plait.weight "model.layers.0.self_attn.k_proj.weight" {block = 0 : i64} : tensor<8x16xf32>
    %9 = plait.weight "model.layers.0.self_attn.v_proj.weight" {block = 0 : i64} : tensor<8x16xf32>
    %10 = plait.weight "model.layers.0.self_attn.k_proj.bias" {block = 0 : i64} : tensor<8xf32>
    %11 = plait.weight "model.layers.0.self_attn.v_proj.bias" {block = 0 : i64} : tensor<8xf32>
    %12, %13, %14 = plait.linears %5 weights(%6, %8, %9 : tensor<16x16xf32>, tensor<8x16xf32>, tensor<8x16xf32>) biases(%7, %10, %11 : tensor<16xf32>, tensor<8xf32>, tensor<8xf32>) {block = 0 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>
    %15 = plait.rope %12, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %16 = plait.rope %13, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x8xf32>, !plait.batch) -> tensor<?x8xf32>
    %17 = plait.attention %15, %16, %14, %1, %0 {heads = 4 : i64, scale = 5.000000e-01 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>, !plait.kv<2x4xf32>, !plait.batch) -> tensor<?x16xf32>
    %18 = plait.weight "model.layers.0.self_attn.o_proj.weight" {block = 0 : i64} : tensor<16x16xf32>
    %19 = plait.linear %17, %18 {block = 0 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %20 = plait.weight "model.layers.0.post_attention_layernorm.weight" {block = 0 : i64} : tensor<16xf32>
    %21, %22 = plait.add_rms_norm %3, %19, %20 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>, tensor<16xf32>) -> (tensor<?x16xf32>, tensor<?x16xf32>)
    %23 = plait.weight "model.layers.0.mlp.gate_proj.weight" {block = 0 : i64} : tensor<24x16xf32>
    %24 = plait.weight "model.layers.0.mlp.up_proj.weight" {block = 0 : i64} : tensor<24x16xf32>
    %25, %26 = plait.linears %22 weights(%23, %24 : tensor<24x16xf32>, tensor<24x16xf32>) {block = 0 : i64} : tensor<?x16xf32> -> tensor<?x24xf32>, tensor<?x24xf32>
    %27 = plait.silu_mul %25, %26 {block = 0 : i64} : (tensor<?x24xf32>, tensor<?x24xf32>) -> tensor<?x24xf32>
    %28 = plait.weight "model.layers.0.mlp.down_proj.weight" {block = 0 : i64} : tensor<16x24xf32>
    %29 = plait.linear %27, %28 {block = 0 : i64} : (tensor<?x24xf32>, tensor<16x24xf32>) -> tensor<?x16xf32>
    %30 = plait.weight "model.norm.weight" : tensor<16xf32>
    %31, %32 = plait.add_rms_norm %21, %29, %30 {eps = 1.000000e-05 : f64} : (tensor<?x16xf32>, tensor<?x16xf32>, tensor<16xf32>) -> (tensor<?x16xf32>, tensor<?x16xf32>)
    %33 = plait.logits %32, %2, %0 : (tensor<?x16xf32>, tensor<32x16xf32>, !plait.batch) -> tensor<?x32xf32>
    func.return %33 : tensor<?x32xf32>
  }
}
