module @jit_ranks attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["model"=4]> {stablehlo.mesh = {axes = [{name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<12xf32>, %arg1: tensor<8x4x12xf32>, %arg2: tensor<12x6xf32>, %arg3: tensor<8x4x6xf32>) -> (tensor<f32> {jax.result_info = "result[0]"}, tensor<12xf32> {jax.result_info = "result[1]"}) {
    %0:2 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3) in_shardings=[<@mesh, [{}]>, <@mesh, [{"model"}, {}, {}]>, <@mesh, [{}, {}]>, <@mesh, [{"model"}, {}, {}]>] out_shardings=[<@mesh, []>, <@mesh, [{}]>] manual_axes={"model"} (%arg4: tensor<12xf32>, %arg5: tensor<2x4x12xf32>, %arg6: tensor<12x6xf32>, %arg7: tensor<2x4x6xf32>) {
      %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %1 = stablehlo.reduce(%arg5 init: %cst) applies stablehlo.add across dimensions = [2] : (tensor<2x4x12xf32>, tensor<f32>) -> tensor<2x4xf32>
      %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1] : (tensor<2x4xf32>) -> tensor<2x4x1xf32>
      %cst_0 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %3 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<2x4x1xf32>
      %4 = stablehlo.divide %2, %3 : tensor<2x4x1xf32>
      %5 = stablehlo.broadcast_in_dim %4, dims = [0, 1, 2] : (tensor<2x4x1xf32>) -> tensor<2x4x12xf32>
      %6 = stablehlo.subtract %arg5, %5 : tensor<2x4x12xf32>
      %7 = stablehlo.multiply %6, %6 : tensor<2x4x12xf32>
      %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %8 = stablehlo.reduce(%7 init: %cst_1) applies stablehlo.add across dimensions = [2] : (tensor<2x4x12xf32>, tensor<f32>) -> tensor<2x4xf32>
      %9 = stablehlo.broadcast_in_dim %8, dims = [0, 1] : (tensor<2x4xf32>) -> tensor<2x4x1xf32>
      %cst_2 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %10 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<2x4x1xf32>
      %11 = stablehlo.divide %9, %10 : tensor<2x4x1xf32>
      %12 = stablehlo.broadcast_in_dim %4, dims = [0, 1, 2] : (tensor<2x4x1xf32>) -> tensor<2x4x12xf32>
      %13 = stablehlo.subtract %arg5, %12 : tensor<2x4x12xf32>
      %cst_3 = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
      %14 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<2x4x1xf32>
      %15 = stablehlo.add %11, %14 : tensor<2x4x1xf32>
      %16 = stablehlo.rsqrt %15 : tensor<2x4x1xf32>
      %17 = stablehlo.broadcast_in_dim %16, dims = [0, 1, 2] : (tensor<2x4x1xf32>) -> tensor<2x4x12xf32>
      %18 = stablehlo.multiply %13, %17 : tensor<2x4x12xf32>
      %19 = stablehlo.broadcast_in_dim %arg4, dims = [2] : (tensor<12xf32>) -> tensor<1x1x12xf32>
      %20 = stablehlo.broadcast_in_dim %19, dims = [0, 1, 2] : (tensor<1x1x12xf32>) -> tensor<2x4x12xf32>
      %21 = stablehlo.multiply %18, %20 : tensor<2x4x12xf32>
      %22 = stablehlo.dot_general %21, %arg6, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x4x12xf32>, tensor<12x6xf32>) -> tensor<2x4x6xf32>
      %23 = stablehlo.subtract %22, %arg7 : tensor<2x4x6xf32>
      %24 = stablehlo.multiply %23, %23 : tensor<2x4x6xf32>
      %cst_4 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %25 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<2x4x6xf32>
      %26 = stablehlo.multiply %25, %23 : tensor<2x4x6xf32>
      %cst_5 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %27 = stablehlo.reduce(%24 init: %cst_5) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<2x4x6xf32>, tensor<f32>) -> tensor<f32>
      %cst_6 = stablehlo.constant dense<4.800000e+01> : tensor<f32>
      %28 = stablehlo.divide %27, %cst_6 : tensor<f32>
      %cst_7 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %cst_8 = stablehlo.constant dense<4.800000e+01> : tensor<f32>
      %29 = stablehlo.divide %cst_7, %cst_8 : tensor<f32>
      %30 = stablehlo.broadcast_in_dim %29, dims = [] : (tensor<f32>) -> tensor<2x4x6xf32>
      %31 = stablehlo.multiply %30, %26 : tensor<2x4x6xf32>
      %32 = stablehlo.dot_general %31, %arg6, contracting_dims = [2] x [1], precision = [DEFAULT, DEFAULT] : (tensor<2x4x6xf32>, tensor<12x6xf32>) -> tensor<2x4x12xf32>
      %33 = stablehlo.multiply %18, %32 : tensor<2x4x12xf32>
      %cst_9 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %34 = stablehlo.reduce(%33 init: %cst_9) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x4x12xf32>, tensor<f32>) -> tensor<12xf32>
      %35 = stablehlo.reshape %34 : (tensor<12xf32>) -> tensor<1x1x12xf32>
      %cst_10 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %36 = stablehlo.reduce(%35 init: %cst_10) applies stablehlo.add across dimensions = [0, 1] : (tensor<1x1x12xf32>, tensor<f32>) -> tensor<12xf32>
      %37 = "stablehlo.all_reduce"(%28) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %42 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %42 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %cst_11 = stablehlo.constant dense<4.000000e+00> : tensor<f32>
      %38 = stablehlo.divide %37, %cst_11 : tensor<f32>
      %cst_12 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
      %39 = stablehlo.broadcast_in_dim %cst_12, dims = [] : (tensor<f32>) -> tensor<12xf32>
      %40 = stablehlo.multiply %39, %36 : tensor<12xf32>
      %41 = stablehlo.subtract %arg4, %40 : tensor<12xf32>
      sdy.return %38, %41 : tensor<f32>, tensor<12xf32>
    } : (tensor<12xf32>, tensor<8x4x12xf32>, tensor<12x6xf32>, tensor<8x4x6xf32>) -> (tensor<f32>, tensor<12xf32>)
    return %0#0, %0#1 : tensor<f32>, tensor<12xf32>
  }
}
