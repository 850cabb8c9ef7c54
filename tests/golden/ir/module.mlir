builtin.module attributes {plait.model = "llama"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: !plait.kv<2x4xf32> {plait.name = "kv.0"}, %2: !plait.kv<2x4xf32, window 8> {plait.name = "kv.1"}) -> (tensor<?x32xf32> {plait.name = "logits"}) {
    %3 = plait.weight "model.embed_tokens.weight" : tensor<32x16xf32>
    %4 = plait.embed %3, %0 : (tensor<32x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %5 = plait.weight "model.layers.0.input_layernorm.weight" {block = 0 : i64} : tensor<16xf32>
    %6 = plait.rms_norm %4, %5 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %7 = plait.weight "model.layers.0.self_attn.q_proj.weight" {block = 0 : i64} : tensor<16x16xf32>
    %8 = plait.linear %6, %7 {block = 0 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %9 = plait.weight "model.layers.0.self_attn.k_proj.weight" {block = 0 : i64} : tensor<8x16xf32>
    %10 = plait.linear %6, %9 {block = 0 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %11 = plait.weight "model.layers.0.self_attn.v_proj.weight" {block = 0 : i64} : tensor<8x16xf32>
    %12 = plait.linear %6, %11 {block = 0 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %13 = plait.rope %8, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %14 = plait.rope %10, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 0 : i64} : (tensor<?x8xf32>, !plait.batch) -> tensor<?x8xf32>
    %15 = plait.attention %13, %14, %12, %1, %0 {heads = 4 : i64, scale = 5.000000e-01 : f64, softcap = 3.000000e+01 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>, !plait.kv<2x4xf32>, !plait.batch) -> tensor<?x16xf32>
    %16 = plait.weight "model.layers.0.self_attn.o_proj.weight" {block = 0 : i64} : tensor<16x16xf32>
    %17 = plait.linear %15, %16 {block = 0 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %18 = plait.add %4, %17 {block = 0 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %19 = plait.weight "model.layers.0.post_attention_layernorm.weight" {block = 0 : i64} : tensor<16xf32>
    %20 = plait.rms_norm %18, %19 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %21 = plait.weight "model.layers.0.mlp.gate_proj.weight" {block = 0 : i64} : tensor<24x16xf32>
    %22 = plait.linear %20, %21 {block = 0 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %23 = plait.weight "model.layers.0.mlp.up_proj.weight" {block = 0 : i64} : tensor<24x16xf32>
    %24 = plait.linear %20, %23 {block = 0 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %25 = plait.silu_mul %22, %24 {block = 0 : i64} : (tensor<?x24xf32>, tensor<?x24xf32>) -> tensor<?x24xf32>
    %26 = plait.weight "model.layers.0.mlp.down_proj.weight" {block = 0 : i64} : tensor<16x24xf32>
    %27 = plait.linear %25, %26 {block = 0 : i64} : (tensor<?x24xf32>, tensor<16x24xf32>) -> tensor<?x16xf32>
    %28 = plait.add %18, %27 {block = 0 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %29 = plait.weight "model.layers.1.input_layernorm.weight" {block = 1 : i64} : tensor<16xf32>
    %30 = plait.rms_norm %28, %29 {eps = 1.000000e-05 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %31 = plait.weight "model.layers.1.self_attn.q_proj.weight" {block = 1 : i64} : tensor<16x16xf32>
    %32 = plait.linear %30, %31 {block = 1 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %33 = plait.weight "model.layers.1.self_attn.k_proj.weight" {block = 1 : i64} : tensor<8x16xf32>
    %34 = plait.linear %30, %33 {block = 1 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %35 = plait.weight "model.layers.1.self_attn.v_proj.weight" {block = 1 : i64} : tensor<8x16xf32>
    %36 = plait.linear %30, %35 {block = 1 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %37 = plait.rope %32, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 1 : i64} : (tensor<?x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %38 = plait.rope %34, %0 {head_dim = 4 : i64, kind = "default", theta = 1.000000e+04 : f64, block = 1 : i64} : (tensor<?x8xf32>, !plait.batch) -> tensor<?x8xf32>
    %39 = plait.attention %37, %38, %36, %2, %0 {heads = 4 : i64, scale = 5.000000e-01 : f64, window = 8 : i64, softcap = 3.000000e+01 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>, !plait.kv<2x4xf32, window 8>, !plait.batch) -> tensor<?x16xf32>
    %40 = plait.weight "model.layers.1.self_attn.o_proj.weight" {block = 1 : i64} : tensor<16x16xf32>
    %41 = plait.linear %39, %40 {block = 1 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %42 = plait.add %28, %41 {block = 1 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %43 = plait.weight "model.layers.1.post_attention_layernorm.weight" {block = 1 : i64} : tensor<16xf32>
    %44 = plait.rms_norm %42, %43 {eps = 1.000000e-05 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %45 = plait.weight "model.layers.1.mlp.gate_proj.weight" {block = 1 : i64} : tensor<24x16xf32>
    %46 = plait.linear %44, %45 {block = 1 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %47 = plait.weight "model.layers.1.mlp.up_proj.weight" {block = 1 : i64} : tensor<24x16xf32>
    %48 = plait.linear %44, %47 {block = 1 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %49 = plait.silu_mul %46, %48 {block = 1 : i64} : (tensor<?x24xf32>, tensor<?x24xf32>) -> tensor<?x24xf32>
    %50 = plait.weight "model.layers.1.mlp.down_proj.weight" {block = 1 : i64} : tensor<16x24xf32>
    %51 = plait.linear %49, %50 {block = 1 : i64} : (tensor<?x24xf32>, tensor<16x24xf32>) -> tensor<?x16xf32>
    %52 = plait.add %42, %51 {block = 1 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %53 = plait.weight "model.norm.weight" : tensor<16xf32>
    %54 = plait.rms_norm %52, %53 {eps = 1.000000e-05 : f64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %55 = plait.logits %54, %3, %0 : (tensor<?x16xf32>, tensor<32x16xf32>, !plait.batch) -> tensor<?x32xf32>
    func.return %55 : tensor<?x32xf32>
  }
}
