// A mean weighted by the roots of `m`, of which each microbatch has its own sum.
func.func @main(%a: tensor<6x8xf32> loc("params['a']"), %b: tensor<8x8xf32> loc("params['b']"), %c: tensor<8x4xf32> loc("params['c']"), %x: tensor<8x6xf32> loc("x"), %y: tensor<8x4xf32> loc("y"), %m: tensor<8xf32> loc("m")) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %least = stablehlo.constant dense<1.0e-3> : tensor<f32>
  %0 = stablehlo.dot_general %x, %a, contracting_dims = [1] x [0] : (tensor<8x6xf32>, tensor<6x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.tanh %0 : tensor<8x8xf32>
  %2 = stablehlo.dot_general %1, %b, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %3 = stablehlo.tanh %2 : tensor<8x8xf32>
  %4 = stablehlo.dot_general %3, %c, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  %5 = stablehlo.subtract %4, %y : tensor<8x4xf32>
  %6 = stablehlo.multiply %5, %5 : tensor<8x4xf32>
  %7 = stablehlo.reduce(%6 init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<8xf32>
  %8 = stablehlo.sqrt %m : tensor<8xf32>
  %9 = stablehlo.multiply %7, %8 : tensor<8xf32>
  %10 = stablehlo.reduce(%9 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
  %11 = stablehlo.reduce(%8 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
  %12 = stablehlo.maximum %11, %least : tensor<f32>
  %13 = stablehlo.divide %10, %12 : tensor<f32>
  return %13 : tensor<f32>
}
