builtin.module attributes {plait.model = "m"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: !plait.kv<1x10xf32, values 6> {plait.name = "kv.0"}, %2: !plait.kv<1x8xf32> {plait.name = "kv.1"}) -> (tensor<?x32xf32> {plait.name = "logits"}) {
    %3 = plait.weight "table" : tensor<32x16xf32>
    %4 = plait.embed %3, %0 : (tensor<32x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %5 = plait.weight "places" : tensor<64x16xf32>
    %6 = plait.embed_positions %5, %0 : (tensor<64x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %7 = plait.add %4, %6 : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %8 = plait.scale %7 {factor = 4.000000e+00 : f64} : (tensor<?x16xf32>) -> tensor<?x16xf32>
    %9 = plait.weight "in" {block = 0 : i64} : tensor<16xf32>
    %10 = plait.weight "in.b" {block = 0 : i64} : tensor<16xf32>
    %11 = plait.layer_norm %8, %9, %10 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %12 = plait.weight "q" {block = 0 : i64} : tensor<16x16xf32>
    %13 = plait.linear %11, %12 {block = 0 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %14 = plait.weight "k_b" {block = 0 : i64} : tensor<2x8x6xf32>
    %15 = plait.head_linear %13, %14 {block = 0 : i64, transposed} : (tensor<?x16xf32>, tensor<2x8x6xf32>) -> tensor<?x12xf32>
    %16 = plait.weight "q_r" {block = 0 : i64} : tensor<8x16xf32>
    %17 = plait.linear %11, %16 {block = 0 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %18 = plait.rope %17, %0 {head_dim = 4 : i64, kind = "yarn", theta = 1.000000e+04 : f64, block = 0 : i64, factor = 8.000000e+00 : f64, original_positions = 4096 : i64, beta_fast = 3.200000e+01 : f64, beta_slow = 1.000000e+00 : f64, truncate = 1 : i64, attention_factor = 1.250000e+00 : f64} : (tensor<?x8xf32>, !plait.batch) -> tensor<?x8xf32>
    %19 = plait.weight "k_r" {block = 0 : i64} : tensor<4x16xf32>
    %20 = plait.linear %11, %19 {block = 0 : i64} : (tensor<?x16xf32>, tensor<4x16xf32>) -> tensor<?x4xf32>
    %21 = plait.rope %20, %0 {head_dim = 4 : i64, kind = "yarn", theta = 1.000000e+04 : f64, block = 0 : i64, factor = 8.000000e+00 : f64, original_positions = 4096 : i64, beta_fast = 3.200000e+01 : f64, beta_slow = 1.000000e+00 : f64, truncate = 1 : i64, attention_factor = 1.250000e+00 : f64} : (tensor<?x4xf32>, !plait.batch) -> tensor<?x4xf32>
    %22 = plait.weight "kv_a" {block = 0 : i64} : tensor<6x16xf32>
    %23 = plait.linear %11, %22 {block = 0 : i64} : (tensor<?x16xf32>, tensor<6x16xf32>) -> tensor<?x6xf32>
    %24 = plait.latent_attention %15, %18, %23, %21, %1, %0 {heads = 2 : i64, scale = 5.000000e-01 : f64, block = 0 : i64} : (tensor<?x12xf32>, tensor<?x8xf32>, tensor<?x6xf32>, tensor<?x4xf32>, !plait.kv<1x10xf32, values 6>, !plait.batch) -> tensor<?x12xf32>
    %25 = plait.weight "v_b" {block = 0 : i64} : tensor<2x8x6xf32>
    %26 = plait.head_linear %24, %25 {block = 0 : i64} : (tensor<?x12xf32>, tensor<2x8x6xf32>) -> tensor<?x16xf32>
    %27 = plait.add %8, %26 {block = 0 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %28 = plait.weight "post" {block = 0 : i64} : tensor<16xf32>
    %29 = plait.layer_norm %27, %28 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %30 = plait.weight "fc" {block = 0 : i64} : tensor<24x16xf32>
    %31 = plait.linear %29, %30 {block = 0 : i64} : (tensor<?x16xf32>, tensor<24x16xf32>) -> tensor<?x24xf32>
    %32 = plait.gelu %31 {block = 0 : i64, approximate = "tanh"} : (tensor<?x24xf32>) -> tensor<?x24xf32>
    %33 = plait.weight "proj" {block = 0 : i64} : tensor<16x24xf32>
    %34 = plait.linear %32, %33 {block = 0 : i64} : (tensor<?x24xf32>, tensor<16x24xf32>) -> tensor<?x16xf32>
    %35 = plait.add %27, %34 {block = 0 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %36 = plait.weight "in1" {block = 1 : i64} : tensor<16xf32>
    %37 = plait.rms_norm %35, %36 {eps = 1.000000e-06 : f64, offset = 1.000000e+00 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %38 = plait.weight "q1" {block = 1 : i64} : tensor<16x16xf32>
    %39 = plait.linear %37, %38 {block = 1 : i64} : (tensor<?x16xf32>, tensor<16x16xf32>) -> tensor<?x16xf32>
    %40 = plait.weight "k1" {block = 1 : i64} : tensor<8x16xf32>
    %41 = plait.linear %37, %40 {block = 1 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %42 = plait.weight "q_n" {block = 1 : i64} : tensor<8xf32>
    %43 = plait.rms_norm %39, %42 {eps = 1.000000e-06 : f64, group = 8 : i64, offset = 1.000000e+00 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<8xf32>) -> tensor<?x16xf32>
    %44 = plait.weight "k_n" {block = 1 : i64} : tensor<8xf32>
    %45 = plait.layer_norm %41, %44 {eps = 1.000000e-06 : f64, group = 8 : i64, block = 1 : i64} : (tensor<?x8xf32>, tensor<8xf32>) -> tensor<?x8xf32>
    %46 = plait.rope %43, %0 {head_dim = 8 : i64, rotary_dim = 4 : i64, kind = "longrope", theta = 1.000000e+04 : f64, block = 1 : i64, factors = [1.000000e+00 : f64, 2.500000e+00 : f64], attention_factor = 1.500000e+00 : f64} : (tensor<?x16xf32>, !plait.batch) -> tensor<?x16xf32>
    %47 = plait.rope %45, %0 {head_dim = 8 : i64, rotary_dim = 4 : i64, kind = "longrope", theta = 1.000000e+04 : f64, block = 1 : i64, factors = [1.000000e+00 : f64, 2.500000e+00 : f64], attention_factor = 1.500000e+00 : f64} : (tensor<?x8xf32>, !plait.batch) -> tensor<?x8xf32>
    %48 = plait.weight "v1" {block = 1 : i64} : tensor<8x16xf32>
    %49 = plait.linear %37, %48 {block = 1 : i64} : (tensor<?x16xf32>, tensor<8x16xf32>) -> tensor<?x8xf32>
    %50 = plait.attention %46, %47, %49, %2, %0 {heads = 2 : i64, scale = 5.000000e-01 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>, !plait.kv<1x8xf32>, !plait.batch) -> tensor<?x16xf32>
    %51 = plait.add %35, %50 {block = 1 : i64} : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %52 = plait.weight "post1" {block = 1 : i64} : tensor<16xf32>
    %53 = plait.rms_norm %51, %52 {eps = 1.000000e-06 : f64, block = 1 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %54 = plait.weight "router.b" {block = 1 : i64} : tensor<4xf32>
    %55 = plait.weight "selection" {block = 1 : i64} : tensor<4xf32>
    %56 = plait.weight "router" {block = 1 : i64} : tensor<4x16xf32>
    %57 = plait.router %53, %56 bias %54 : tensor<4xf32> selection %55 : tensor<4xf32> {experts_per_token = 2 : i64, scoring = "sigmoid", normalise = 1.000000e-20 : f64, scale = 2.500000e+00 : f64, groups = 2 : i64, groups_per_token = 1 : i64, group_score = "top2", block = 1 : i64} : tensor<?x16xf32>, tensor<4x16xf32> -> tensor<?x4xf32>
    %58 = plait.weight "gate" {block = 1 : i64} : tensor<4x24x16xf32>
    %59 = plait.weight "up" {block = 1 : i64} : tensor<4x24x16xf32>
    %60 = plait.weight "down" {block = 1 : i64} : tensor<4x16x24xf32>
    %61 = plait.weight "gate.b" {block = 1 : i64} : tensor<4x24xf32>
    %62 = plait.weight "up.b" {block = 1 : i64} : tensor<4x24xf32>
    %63 = plait.weight "down.b" {block = 1 : i64} : tensor<4x16xf32>
    %64 = plait.experts %53, %57 experts(%58, %59, %60 : tensor<4x24x16xf32>, tensor<4x24x16xf32>, tensor<4x16x24xf32>) biases(%61, %62, %63 : tensor<4x24xf32>, tensor<4x24xf32>, tensor<4x16xf32>) {experts_per_token = 2 : i64, activation = "clamped_swiglu", alpha = 1.500000e+00 : f64, limit = 7.000000e+00 : f64, block = 1 : i64} : tensor<?x16xf32>, tensor<?x4xf32> -> tensor<?x16xf32>
    %65 = plait.weight "gate2" {block = 1 : i64} : tensor<4x24x16x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 8>>
    %66 = plait.weight "up2" {block = 1 : i64} : tensor<4x24x16x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 8>>
    %67 = plait.weight "down2" {block = 1 : i64} : tensor<4x16x24x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 8>>
    %68 = plait.experts %53, %57 experts(%65, %66, %67 : tensor<4x24x16x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 8>>, tensor<4x24x16x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 8>>, tensor<4x16x24x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 8>>) {experts_per_token = 2 : i64, activation = "silu", block = 1 : i64} : tensor<?x16xf32>, tensor<?x4xf32> -> tensor<?x16xf32>
    %69 = plait.add %64, %68 : (tensor<?x16xf32>, tensor<?x16xf32>) -> tensor<?x16xf32>
    %70 = plait.weight "head" : tensor<32x16xf32>
    %71 = plait.logits %69, %70, %0 {scale = 2.500000e-01 : f64, softcap = 3.000000e+01 : f64} : (tensor<?x16xf32>, tensor<32x16xf32>, !plait.batch) -> tensor<?x32xf32>
    func.return %71 : tensor<?x32xf32>
  }
}
