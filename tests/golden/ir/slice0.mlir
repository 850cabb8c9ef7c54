builtin.module attributes {plait.model = "llama", plait.slice = "0:1 of 2"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: !plait.kv<2x4xf32> {plait.name = "kv.0"}) -> (tensor<?x16xf32> {plait.name = "x0"}) {
    %2 = plait.weight "model.embed_tokens.weight" : tensor<32x16xf32>
    %3 = plait.weight "model.layers.0.input_layernorm.weight" {block = 0 : i64} : tensor<16xf32>
    %4 = plait.weight "model.layers.0.self_attn.q_proj.weight" {block = 0 : i64} : tensor<16x16xf32>
    %5 = plait.weight "model.layers.0.self_attn.k_proj.weight" {block = 0 : i64} : tensor<8x16xf32>
    %6 = plait.weight "model.layers.0.self_attn.v_proj.weight" {block = 0 : i64} : tensor<8x16xf32>
    %7 = plait.weight "model.layers.0.self_attn.o_proj.weight" {block = 0 : i64} : tensor<16x16xf32>
    %8 = plait.weight "model.layers.0.post_attention_layernorm.weight" {block = 0 : i64} : tensor<16xf32>
    %9 = plait.weight "model.layers.0.mlp.gate_proj.weight" {block = 0 : i64} : tensor<24x16xf32>
    %10 = plait.weight "model.layers.0.mlp.up_proj.weight" {block = 0 : i64} : tensor<24x16xf32>
    %11 = plait.weight "model.layers.0.mlp.down_proj.weight" {block = 0 : i64} : tensor<16x24xf32>
    %12 = plait.embed %2, %0 : (tensor<32x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %13 = plait.rms_norm %12, %3 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %14 = plait.linear %13, %4 {block = 0 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %15 = plait.linear %13, %5 {block = 0 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %16 = plait.linear %13, %6 {block = 0 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %17 = plait.rope %14, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %18 = plait.rope %15, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x8xf32>, !plait.batch) -> tensor<?x8xf32>
    %19 = plait.attention %17, %18, %16, %1, %0 {heads = 4 : i64, scale = 5.000000e-01 : f64, softcap = 3.000000e+01 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>, !plait.kv<2x4xf32>, !plait.batch) -> tensor<?x16xf32>
    %20 = plait.linear %19, %7 {block = 0 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %21 = plait.add %12, %20 {block = 0 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %22 = plait.rms_norm %21, %8 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %23 = plait.linear %22, %9 {block = 0 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %24 = plait.linear %22, %10 {block = 0 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %25 = plait.silu_mul %23, %24 {block = 0 : i64} : (tensor<?x24xf32>, tensor<?x24xf32>) -> tensor<?x24xf32>
    %26 = plait.linear %25, %11 {block = 0 : i64} : (tensor<?x24xf32>, tensor<16x24xf32>) -> tensor<?x16xf32>
    %27 = plait.add %21, %26 {block = 0 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    func.return %27 : tensor<?x16xf32>
  }
}
