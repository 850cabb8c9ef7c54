builtin.module attributes {plait.model = "opaque"} {
  func.func @main(%0: !plait.batch {plait.name = "batch"}, %1: !plait.kv<1x1xf32> {plait.name = "kv.0"}) -> (tensor<?x7xf32> {plait.name = "logits"}) {
    %2 = plait.weight "w" {block = 0 : i64} : tensor<3x4xf32>
    %3 = plait.weight "b" {block = 0 : i64} : tensor<4xbf16>
    %4 = plait.opaque %0, %1, %2, %3 {vocabulary = 7 : i64, block = 0 : i64, programs = ["module {\0A  \22eight\22\0A}", "module {}"], lengths = array<i64: 8, 16>, flops = array<i64: 10, 20>} : (!plait.batch, !plait.kv<1x1xf32>, tensor<3x4xf32>, tensor<4xbf16>) -> tensor<?x7xf32>
    func.return %4 : tensor<?x7xf32>
  }
}
