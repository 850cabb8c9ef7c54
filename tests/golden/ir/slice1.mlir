builtin.module attributes {plait.model = "llama", plait.slice = "1:2 of 2"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: tensor<?x16xf32> {plait.name = "x0"}, %2: !plait.kv<2x4xf32, window 8> {plait.name = "kv.1"}) -> (tensor<?x32xf32> {plait.name = "logits"}) {
    %3 = plait.weight "model.embed_tokens.weight" : tensor<32x16xf32>
    %4 = plait.weight "model.layers.1.input_layernorm.weight" {block = 1 : i64} : tensor<16xf32>
    %5 = plait.weight "model.layers.1.self_attn.q_proj.weight" {block = 1 : i64} : tensor<16x16xf32>
    %6 = plait.weight "model.layers.1.self_attn.k_proj.weight" {block = 1 : i64} : tensor<8x16xf32>
    %7 = plait.weight "model.layers.1.self_attn.v_proj.weight" {block = 1 : i64} : tensor<8x16xf32>
    %8 = plait.weight "model.layers.1.self_attn.o_proj.weight" {block = 1 : i64} : tensor<16x16xf32>
    %9 = plait.weight "model.layers.1.post_attention_layernorm.weight" {block = 1 : i64} : tensor<16xf32>
    %10 = plait.weight "model.layers.1.mlp.gate_proj.weight" {block = 1 : i64} : tensor<24x16xf32>
    %11 = plait.weight "model.layers.1.mlp.up_proj.weight" {block = 1 : i64} : tensor<24x16xf32>
    %12 = plait.weight "model.layers.1.mlp.down_proj.weight" {block = 1 : i64} : tensor<16x24xf32>
    %13 = plait.weight "model.norm.weight" : tensor<16xf32>
    %14 = plait.rms_norm %1, %4 {eps = 1.000000e-05 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %15 = plait.linear %14, %5 {block = 1 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %16 = plait.linear %14, %6 {block = 1 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %17 = plait.linear %14, %7 {block = 1 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %18 = plait.rope %15, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 1 : i64} : (tensor<?x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %19 = plait.rope %16, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 1 : i64} : (tensor<?x8xf32>, !plait.batch) -> tensor<?x8xf32>
    %20 = plait.attention %18, %19, %17, %2, %0 {heads = 4 : i64, scale = 5.000000e-01 : f64, window = 8 : i64, softcap = 3.000000e+01 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>, !plait.kv<2x4xf32, window 8>, !plait.batch) -> tensor<?x16xf32>
    %21 = plait.linear %20, %8 {block = 1 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %22 = plait.add %1, %21 {block = 1 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %23 = plait.rms_norm %22, %9 {eps = 1.000000e-05 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %24 = plait.linear %23, %10 {block = 1 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %25 = plait.linear %23, %11 {block = 1 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %26 = plait.silu_mul %24, %25 {block = 1 : i64} : (tensor<?x24xf32>, tensor<?x24xf32>) -> tensor<?x24xf32>
    %27 = plait.linear %26, %12 {block = 1 : i64} : (tensor<?x24xf32>, tensor<16x24xf32>) -> tensor<?x16xf32>
    %28 = plait.add %22, %27 {block = 1 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %29 = plait.rms_norm %28, %13 {eps = 1.000000e-05 : f64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %30 = plait.logits %29, %3, %0 : (tensor<?x16xf32>, tensor<32x16xf32>, !plait.batch) -> tensor<?x32xf32>
    func.return %30 : tensor<?x32xf32>
  }
}
