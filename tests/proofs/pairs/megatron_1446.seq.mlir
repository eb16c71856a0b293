module @jit_sequential_norm_step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<12xf32>, %arg1: tensor<8x4x12xf32>, %arg2: tensor<12x6xf32>, %arg3: tensor<8x4x6xf32>) -> (tensor<f32> {jax.result_info = "result[0]"}, tensor<12xf32> {jax.result_info = "result[1]"}) {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.reduce(%arg1 init: %cst) applies stablehlo.add across dimensions = [2] : (tensor<8x4x12xf32>, tensor<f32>) -> tensor<8x4xf32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [0, 1] : (tensor<8x4xf32>) -> tensor<8x4x1xf32>
    %cst_0 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
    %2 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x4x1xf32>
    %3 = stablehlo.divide %1, %2 : tensor<8x4x1xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1, 2] : (tensor<8x4x1xf32>) -> tensor<8x4x12xf32>
    %5 = stablehlo.subtract %arg1, %4 : tensor<8x4x12xf32>
    %6 = stablehlo.multiply %5, %5 : tensor<8x4x12xf32>
    %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %7 = stablehlo.reduce(%6 init: %cst_1) applies stablehlo.add across dimensions = [2] : (tensor<8x4x12xf32>, tensor<f32>) -> tensor<8x4xf32>
    %8 = stablehlo.broadcast_in_dim %7, dims = [0, 1] : (tensor<8x4xf32>) -> tensor<8x4x1xf32>
    %cst_2 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
    %9 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<8x4x1xf32>
    %10 = stablehlo.divide %8, %9 : tensor<8x4x1xf32>
    %11 = stablehlo.broadcast_in_dim %3, dims = [0, 1, 2] : (tensor<8x4x1xf32>) -> tensor<8x4x12xf32>
    %12 = stablehlo.subtract %arg1, %11 : tensor<8x4x12xf32>
    %cst_3 = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
    %13 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<8x4x1xf32>
    %14 = stablehlo.add %10, %13 : tensor<8x4x1xf32>
    %15 = stablehlo.rsqrt %14 : tensor<8x4x1xf32>
    %16 = stablehlo.broadcast_in_dim %15, dims = [0, 1, 2] : (tensor<8x4x1xf32>) -> tensor<8x4x12xf32>
    %17 = stablehlo.multiply %12, %16 : tensor<8x4x12xf32>
    %18 = stablehlo.broadcast_in_dim %arg0, dims = [2] : (tensor<12xf32>) -> tensor<1x1x12xf32>
    %19 = stablehlo.broadcast_in_dim %18, dims = [0, 1, 2] : (tensor<1x1x12xf32>) -> tensor<8x4x12xf32>
    %20 = stablehlo.multiply %17, %19 : tensor<8x4x12xf32>
    %21 = stablehlo.dot_general %20, %arg2, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x4x12xf32>, tensor<12x6xf32>) -> tensor<8x4x6xf32>
    %22 = stablehlo.subtract %21, %arg3 : tensor<8x4x6xf32>
    %23 = stablehlo.multiply %22, %22 : tensor<8x4x6xf32>
    %cst_4 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %24 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<8x4x6xf32>
    %25 = stablehlo.multiply %24, %22 : tensor<8x4x6xf32>
    %cst_5 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %26 = stablehlo.reduce(%23 init: %cst_5) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<8x4x6xf32>, tensor<f32>) -> tensor<f32>
    %cst_6 = stablehlo.constant dense<1.920000e+02> : tensor<f32>
    %27 = stablehlo.divide %26, %cst_6 : tensor<f32>
    %cst_7 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.920000e+02> : tensor<f32>
    %28 = stablehlo.divide %cst_7, %cst_8 : tensor<f32>
    %29 = stablehlo.broadcast_in_dim %28, dims = [] : (tensor<f32>) -> tensor<8x4x6xf32>
    %30 = stablehlo.multiply %29, %25 : tensor<8x4x6xf32>
    %31 = stablehlo.dot_general %30, %arg2, contracting_dims = [2] x [1], precision = [DEFAULT, DEFAULT] : (tensor<8x4x6xf32>, tensor<12x6xf32>) -> tensor<8x4x12xf32>
    %32 = stablehlo.multiply %17, %31 : tensor<8x4x12xf32>
    %cst_9 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %33 = stablehlo.reduce(%32 init: %cst_9) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4x12xf32>, tensor<f32>) -> tensor<12xf32>
    %34 = stablehlo.reshape %33 : (tensor<12xf32>) -> tensor<1x1x12xf32>
    %cst_10 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %35 = stablehlo.reduce(%34 init: %cst_10) applies stablehlo.add across dimensions = [0, 1] : (tensor<1x1x12xf32>, tensor<f32>) -> tensor<12xf32>
    %cst_11 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %36 = stablehlo.broadcast_in_dim %cst_11, dims = [] : (tensor<f32>) -> tensor<12xf32>
    %37 = stablehlo.multiply %36, %35 : tensor<12xf32>
    %38 = stablehlo.subtract %arg0, %37 : tensor<12xf32>
    return %27, %38 : tensor<f32>, tensor<12xf32>
  }
}
