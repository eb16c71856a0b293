module @jit__lambda attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<12x6xf32>, %arg1: tensor<2x8x12xf32>, %arg2: tensor<2x8x6xf32>) -> (tensor<12x6xf32> {jax.result_info = "result"}) {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
    %1 = stablehlo.slice %arg1 [0:1, 0:8, 0:12] : (tensor<2x8x12xf32>) -> tensor<1x8x12xf32>
    %2 = stablehlo.reshape %1 : (tensor<1x8x12xf32>) -> tensor<8x12xf32>
    %3 = stablehlo.dot_general %2, %arg0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x12xf32>, tensor<12x6xf32>) -> tensor<8x6xf32>
    %4 = stablehlo.tanh %3 : tensor<8x6xf32>
    %cst_0 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x6xf32>
    %6 = stablehlo.subtract %5, %4 : tensor<8x6xf32>
    %7 = stablehlo.slice %arg2 [0:1, 0:8, 0:6] : (tensor<2x8x6xf32>) -> tensor<1x8x6xf32>
    %8 = stablehlo.reshape %7 : (tensor<1x8x6xf32>) -> tensor<8x6xf32>
    %9 = stablehlo.subtract %4, %8 : tensor<8x6xf32>
    %cst_1 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %10 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<8x6xf32>
    %11 = stablehlo.multiply %10, %9 : tensor<8x6xf32>
    %cst_2 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %cst_3 = stablehlo.constant dense<4.800000e+01> : tensor<f32>
    %12 = stablehlo.divide %cst_2, %cst_3 : tensor<f32>
    %13 = stablehlo.broadcast_in_dim %12, dims = [] : (tensor<f32>) -> tensor<8x6xf32>
    %14 = stablehlo.multiply %13, %11 : tensor<8x6xf32>
    %15 = stablehlo.multiply %14, %6 : tensor<8x6xf32>
    %16 = stablehlo.multiply %15, %4 : tensor<8x6xf32>
    %17 = stablehlo.add %15, %16 : tensor<8x6xf32>
    %18 = stablehlo.dot_general %17, %2, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x6xf32>, tensor<8x12xf32>) -> tensor<6x12xf32>
    %19 = stablehlo.transpose %18, dims = [1, 0] : (tensor<6x12xf32>) -> tensor<12x6xf32>
    %20 = stablehlo.add %0, %19 : tensor<12x6xf32>
    %21 = stablehlo.slice %arg1 [1:2, 0:8, 0:12] : (tensor<2x8x12xf32>) -> tensor<1x8x12xf32>
    %22 = stablehlo.reshape %21 : (tensor<1x8x12xf32>) -> tensor<8x12xf32>
    %23 = stablehlo.dot_general %22, %arg0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x12xf32>, tensor<12x6xf32>) -> tensor<8x6xf32>
    %24 = stablehlo.tanh %23 : tensor<8x6xf32>
    %cst_4 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %25 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<8x6xf32>
    %26 = stablehlo.subtract %25, %24 : tensor<8x6xf32>
    %27 = stablehlo.slice %arg2 [1:2, 0:8, 0:6] : (tensor<2x8x6xf32>) -> tensor<1x8x6xf32>
    %28 = stablehlo.reshape %27 : (tensor<1x8x6xf32>) -> tensor<8x6xf32>
    %29 = stablehlo.subtract %24, %28 : tensor<8x6xf32>
    %cst_5 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %30 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<8x6xf32>
    %31 = stablehlo.multiply %30, %29 : tensor<8x6xf32>
    %cst_6 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %cst_7 = stablehlo.constant dense<4.800000e+01> : tensor<f32>
    %32 = stablehlo.divide %cst_6, %cst_7 : tensor<f32>
    %33 = stablehlo.broadcast_in_dim %32, dims = [] : (tensor<f32>) -> tensor<8x6xf32>
    %34 = stablehlo.multiply %33, %31 : tensor<8x6xf32>
    %35 = stablehlo.multiply %34, %26 : tensor<8x6xf32>
    %36 = stablehlo.multiply %35, %24 : tensor<8x6xf32>
    %37 = stablehlo.add %35, %36 : tensor<8x6xf32>
    %38 = stablehlo.dot_general %37, %22, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x6xf32>, tensor<8x12xf32>) -> tensor<6x12xf32>
    %39 = stablehlo.transpose %38, dims = [1, 0] : (tensor<6x12xf32>) -> tensor<12x6xf32>
    %40 = stablehlo.add %20, %39 : tensor<12x6xf32>
    %cst_8 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %41 = stablehlo.broadcast_in_dim %cst_8, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
    %42 = stablehlo.multiply %41, %40 : tensor<12x6xf32>
    %cst_9 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %43 = stablehlo.broadcast_in_dim %cst_9, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
    %44 = stablehlo.multiply %42, %43 : tensor<12x6xf32>
    %45 = stablehlo.subtract %arg0, %44 : tensor<12x6xf32>
    return %45 : tensor<12x6xf32>
  }
}
