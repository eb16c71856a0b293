module @jit_automatic attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<12x16xf32>, %arg1: tensor<16x6xf32>, %arg2: tensor<8x12xf32>, %arg3: tensor<8x6xf32>) -> (tensor<f32> {jax.result_info = "result[0]"}, tensor<12x16xf32> {jax.result_info = "result[1]"}, tensor<16x6xf32> {jax.result_info = "result[2]"}) {
    %0:3 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3) in_shardings=[<@mesh, [{}, {"model"}]>, <@mesh, [{"model"}, {}]>, <@mesh, [{"data"}, {}]>, <@mesh, [{"data"}, {}]>] out_shardings=[<@mesh, []>, <@mesh, [{}, {"model"}]>, <@mesh, [{"model"}, {}]>] manual_axes={"data", "model"} (%arg4: tensor<12x4xf32>, %arg5: tensor<4x6xf32>, %arg6: tensor<4x12xf32>, %arg7: tensor<4x6xf32>) {
      %1 = stablehlo.dot_general %arg6, %arg4, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x12xf32>, tensor<12x4xf32>) -> tensor<4x4xf32>
      %2 = stablehlo.tanh %1 : tensor<4x4xf32>
      %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %3 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<4x4xf32>
      %4 = stablehlo.subtract %3, %2 : tensor<4x4xf32>
      %5 = stablehlo.dot_general %2, %arg5, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x4xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
      %6 = "stablehlo.all_reduce"(%5) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %35 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %35 : tensor<f32>
      }) : (tensor<4x6xf32>) -> tensor<4x6xf32>
      %7 = stablehlo.subtract %6, %arg7 : tensor<4x6xf32>
      %8 = stablehlo.multiply %7, %7 : tensor<4x6xf32>
      %cst_0 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %9 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<4x6xf32>
      %10 = stablehlo.multiply %9, %7 : tensor<4x6xf32>
      %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %11 = stablehlo.reduce(%8 init: %cst_1) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x6xf32>, tensor<f32>) -> tensor<f32>
      %cst_2 = stablehlo.constant dense<2.400000e+01> : tensor<f32>
      %12 = stablehlo.divide %11, %cst_2 : tensor<f32>
      %13 = "stablehlo.all_reduce"(%12) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %35 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %35 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %cst_3 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %14 = stablehlo.divide %13, %cst_3 : tensor<f32>
      %cst_4 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %cst_5 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %15 = stablehlo.divide %cst_4, %cst_5 : tensor<f32>
      %16 = stablehlo.divide %15, %cst_2 : tensor<f32>
      %17 = stablehlo.broadcast_in_dim %16, dims = [] : (tensor<f32>) -> tensor<4x6xf32>
      %18 = stablehlo.multiply %17, %10 : tensor<4x6xf32>
      %19 = stablehlo.dot_general %18, %2, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x6xf32>, tensor<4x4xf32>) -> tensor<6x4xf32>
      %20 = stablehlo.transpose %19, dims = [1, 0] : (tensor<6x4xf32>) -> tensor<4x6xf32>
      %21 = stablehlo.dot_general %18, %arg5, contracting_dims = [1] x [1], precision = [DEFAULT, DEFAULT] : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x4xf32>
      %22 = "stablehlo.all_reduce"(%20) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %35 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %35 : tensor<f32>
      }) : (tensor<4x6xf32>) -> tensor<4x6xf32>
      %23 = stablehlo.multiply %21, %4 : tensor<4x4xf32>
      %24 = stablehlo.multiply %23, %2 : tensor<4x4xf32>
      %25 = stablehlo.add %23, %24 : tensor<4x4xf32>
      %26 = stablehlo.dot_general %25, %arg6, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x4xf32>, tensor<4x12xf32>) -> tensor<4x12xf32>
      %27 = stablehlo.transpose %26, dims = [1, 0] : (tensor<4x12xf32>) -> tensor<12x4xf32>
      %28 = "stablehlo.all_reduce"(%27) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %35 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %35 : tensor<f32>
      }) : (tensor<12x4xf32>) -> tensor<12x4xf32>
      %cst_6 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
      %29 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<12x4xf32>
      %30 = stablehlo.multiply %29, %28 : tensor<12x4xf32>
      %31 = stablehlo.subtract %arg4, %30 : tensor<12x4xf32>
      %cst_7 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
      %32 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<4x6xf32>
      %33 = stablehlo.multiply %32, %22 : tensor<4x6xf32>
      %34 = stablehlo.subtract %arg5, %33 : tensor<4x6xf32>
      sdy.return %14, %31, %34 : tensor<f32>, tensor<12x4xf32>, tensor<4x6xf32>
    } : (tensor<12x16xf32>, tensor<16x6xf32>, tensor<8x12xf32>, tensor<8x6xf32>) -> (tensor<f32>, tensor<12x16xf32>, tensor<16x6xf32>)
    return %0#0, %0#1, %0#2 : tensor<f32>, tensor<12x16xf32>, tensor<16x6xf32>
  }
}
