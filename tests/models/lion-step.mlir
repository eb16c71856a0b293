module @jit_step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6x3xf32>, %arg1: tensor<i32>, %arg2: tensor<6x3xf32>, %arg3: tensor<8x6xf32>, %arg4: tensor<8x3xf32>) -> (tensor<6x3xf32> {jax.result_info = "result[0]['w']"}, tensor<i32> {jax.result_info = "result[1][0].count"}, tensor<6x3xf32> {jax.result_info = "result[1][0].mu['w']"}, tensor<f32> {jax.result_info = "result[2]"}) {
    %0 = stablehlo.dot_general %arg3, %arg0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x6xf32>, tensor<6x3xf32>) -> tensor<8x3xf32>
    %1 = stablehlo.subtract %0, %arg4 : tensor<8x3xf32>
    %2 = stablehlo.multiply %1, %1 : tensor<8x3xf32>
    %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %3 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x3xf32>
    %4 = stablehlo.multiply %3, %1 : tensor<8x3xf32>
    %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %5 = stablehlo.reduce(%2 init: %cst_0) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x3xf32>, tensor<f32>) -> tensor<f32>
    %cst_1 = stablehlo.constant dense<2.400000e+01> : tensor<f32>
    %6 = stablehlo.divide %5, %cst_1 : tensor<f32>
    %cst_2 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %cst_3 = stablehlo.constant dense<2.400000e+01> : tensor<f32>
    %7 = stablehlo.divide %cst_2, %cst_3 : tensor<f32>
    %8 = stablehlo.broadcast_in_dim %7, dims = [] : (tensor<f32>) -> tensor<8x3xf32>
    %9 = stablehlo.multiply %8, %4 : tensor<8x3xf32>
    %10 = stablehlo.dot_general %9, %arg3, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x3xf32>, tensor<8x6xf32>) -> tensor<3x6xf32>
    %11 = stablehlo.transpose %10, dims = [1, 0] : (tensor<3x6xf32>) -> tensor<6x3xf32>
    %cst_4 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %12 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<6x3xf32>
    %13 = stablehlo.multiply %12, %11 : tensor<6x3xf32>
    %cst_5 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %14 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<6x3xf32>
    %15 = stablehlo.multiply %14, %arg2 : tensor<6x3xf32>
    %16 = stablehlo.add %13, %15 : tensor<6x3xf32>
    %17 = stablehlo.sign %16 : tensor<6x3xf32>
    %cst_6 = stablehlo.constant dense<0.00999999977> : tensor<f32>
    %18 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<6x3xf32>
    %19 = stablehlo.multiply %18, %11 : tensor<6x3xf32>
    %cst_7 = stablehlo.constant dense<9.900000e-01> : tensor<f32>
    %20 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<6x3xf32>
    %21 = stablehlo.multiply %20, %arg2 : tensor<6x3xf32>
    %22 = stablehlo.add %19, %21 : tensor<6x3xf32>
    %c = stablehlo.constant dense<2147483647> : tensor<i32>
    %23 = stablehlo.compare LT, %arg1, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_8 = stablehlo.constant dense<1> : tensor<i32>
    %24 = stablehlo.add %arg1, %c_8 : tensor<i32>
    %c_9 = stablehlo.constant dense<2147483647> : tensor<i32>
    %25 = call @_where(%23, %24, %c_9) : (tensor<i1>, tensor<i32>, tensor<i32>) -> tensor<i32>
    %cst_10 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %26 = stablehlo.broadcast_in_dim %cst_10, dims = [] : (tensor<f32>) -> tensor<6x3xf32>
    %27 = stablehlo.multiply %26, %arg0 : tensor<6x3xf32>
    %28 = stablehlo.add %17, %27 : tensor<6x3xf32>
    %cst_11 = stablehlo.constant dense<-9.99999974E-5> : tensor<f32>
    %29 = stablehlo.broadcast_in_dim %cst_11, dims = [] : (tensor<f32>) -> tensor<6x3xf32>
    %30 = stablehlo.multiply %29, %28 : tensor<6x3xf32>
    %31 = stablehlo.add %arg0, %30 : tensor<6x3xf32>
    return %31, %25, %22, %6 : tensor<6x3xf32>, tensor<i32>, tensor<6x3xf32>, tensor<f32>
  }
  func.func private @_where(%arg0: tensor<i1>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<i1>, tensor<i32>
    return %0 : tensor<i32>
  }
}
