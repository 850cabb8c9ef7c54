builtin.module attributes {plait.model = "m"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: !plait.kv<2x4xf8E4M3FN> {plait.name = "kv.0"}) -> (tensor<?x32xf32> {plait.name = "logits"}) {
    %2 = plait.weight "table" : tensor<32x16x!plait.quant<si8, scale f16 group 8>>
    %3 = plait.embed %2, %0 : (tensor<32x16x!plait.quant<si8, scale f16 group 8>>, !plait.batch) -> tensor<?x16xf32>
    %4 = plait.weight "norm" {block = 0 : i64} : tensor<16xf32>
    %5 = plait.rms_norm %3, %4 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %6 = plait.weight "q.w" {block = 0 : i64} : tensor<16x16x!plait.quant<f8E4M3FN, scale f32 block 8x12>>
    %7 = plait.linear %5, %6 {block = 0 : i64} : (tensor<?x16xf32>, tensor<16x16x!plait.quant<f8E4M3FN, scale f32 block 8x12>>) -> tensor<?x16xf32>
    %8 = plait.rms_norm %3, %4 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %9 = plait.weight "k.w" {block = 0 : i64} : tensor<8x16x!plait.quant<f8E4M3FN, scale f32 per tensor>>
    %10 = plait.linear %8, %9 {block = 0 : i64} : (tensor<?x16xf32>, tensor<8x16x!plait.quant<f8E4M3FN, scale f32 per tensor>>) -> tensor<?x8xf32>
    %11 = plait.rms_norm %3, %4 {eps = 1.000000e-05 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<16xf32>) -> tensor<?x16xf32>
    %12 = plait.weight "v.w" {block = 0 : i64} : tensor<8x16x!plait.quant<f8E5M2, scale bf16 per row>>
    %13 = plait.linear %11, %12 {block = 0 : i64} : (tensor<?x16xf32>, tensor<8x16x!plait.quant<f8E5M2, scale bf16 per row>>) -> tensor<?x8xf32>
    %14 = plait.weight "sinks" {block = 0 : i64} : tensor<4xf32>
    %15 = plait.attention %7, %10, %13, %1, %0, %14 {heads = 4 : i64, scale = 5.000000e-01 : f64, block = 0 : i64} : (tensor<?x16xf32>, tensor<?x8xf32>, tensor<?x8xf32>, !plait.kv<2x4xf8E4M3FN>, !plait.batch, tensor<4xf32>) -> tensor<?x16xf32>
    %16 = plait.weight "gate.w" {block = 0 : i64} : tensor<24x16x!plait.quant<ui4, scale f16 group 4, zero 8>>
    %17 = plait.linear %15, %16 {block = 0 : i64} : (tensor<?x16xf32>, tensor<24x16x!plait.quant<ui4, scale f16 group 4, zero 8>>) -> tensor<?x24xf32>
    %18 = plait.weight "up.w" {block = 0 : i64} : tensor<24x16x!plait.quant<ui4, scale f16 group 4, zero f16>>
    %19 = plait.linear %15, %18 {block = 0 : i64} : (tensor<?x16xf32>, tensor<24x16x!plait.quant<ui4, scale f16 group 4, zero f16>>) -> tensor<?x24xf32>
    %20 = plait.gelu_mul %17, %19 {block = 0 : i64, approximate = "tanh"} : (tensor<?x24xf32>, tensor<?x24xf32>) -> tensor<?x24xf32>
    %21 = plait.weight "nvfp4.w" {block = 0 : i64} : tensor<32x24x!plait.quant<f4E2M1FN, scale f8E4M3FN group 8, outer f32>>
    %22 = plait.linear %20, %21 {block = 0 : i64} : (tensor<?x24xf32>, tensor<32x24x!plait.quant<f4E2M1FN, scale f8E4M3FN group 8, outer f32>>) -> tensor<?x32xf32>
    %23 = plait.weight "mxfp4.w" {block = 0 : i64} : tensor<64x32x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 32>>
    %24 = plait.linear %22, %23 {block = 0 : i64} : (tensor<?x32xf32>, tensor<64x32x!plait.quant<f4E2M1FN, scale f8E8M0FNU group 32>>) -> tensor<?x64xf32>
    %25 = plait.weight "nf4.w" {block = 0 : i64} : tensor<64x64x!plait.quant<!plait.nf4, scale f32 group 64>>
    %26 = plait.linear %24, %25 {block = 0 : i64} : (tensor<?x64xf32>, tensor<64x64x!plait.quant<!plait.nf4, scale f32 group 64>>) -> tensor<?x64xf32>
    %27 = plait.weight "u8.w" {block = 0 : i64} : tensor<256x64x!plait.quant<ui8, scale f16 group 32, zero f16, order i32>>
    %28 = plait.linear %26, %27 {block = 0 : i64} : (tensor<?x64xf32>, tensor<256x64x!plait.quant<ui8, scale f16 group 32, zero f16, order i32>>) -> tensor<?x256xf32>
    %29 = plait.weight "packed.w" {block = 0 : i64} : tensor<24x256x!plait.packed<Q4_K>>
    %30 = plait.linear %28, %29 {block = 0 : i64} : (tensor<?x256xf32>, tensor<24x256x!plait.packed<Q4_K>>) -> tensor<?x24xf32>
    %31 = plait.weight "down.w" : tensor<16x24x!plait.quant<ui4, scale f16 group 24, min f16>>
    %32 = plait.linear %30, %31 : (tensor<?x24xf32>, tensor<16x24x!plait.quant<ui4, scale f16 group 24, min f16>>) -> tensor<?x16xf32>
    %33 = plait.weight "head" : tensor<32x16x!plait.quant<f8E4M3FNUZ, scale f32 per tensor>>
    %34 = plait.logits %32, %33, %0 : (tensor<?x16xf32>, tensor<32x16x!plait.quant<f8E4M3FNUZ, scale f32 per tensor>>, !plait.batch) -> tensor<?x32xf32>
    func.return %34 : tensor<?x32xf32>
  }
}
