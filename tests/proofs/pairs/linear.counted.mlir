module @jit_linear_counted attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<12x6xf32>, %arg1: tensor<6xf32>, %arg2: tensor<16x12xf32>, %arg3: tensor<16x6xf32>) -> (tensor<f32> {jax.result_info = "result[0]"}, tensor<12x6xf32> {jax.result_info = "result[1]"}, tensor<6xf32> {jax.result_info = "result[2]"}) {
    %0:3 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}]>, <@mesh, [{"data", "model"}, {}]>, <@mesh, [{"data", "model"}, {}]>] out_shardings=[<@mesh, []>, <@mesh, [{}, {}]>, <@mesh, [{}]>] manual_axes={"data", "model"} (%arg4: tensor<12x6xf32>, %arg5: tensor<6xf32>, %arg6: tensor<2x12xf32>, %arg7: tensor<2x6xf32>) {
      %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %1 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %2 = stablehlo.reduce(%1 init: %cst_0) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x6xf32>, tensor<f32>) -> tensor<f32>
      %3 = "stablehlo.all_reduce"(%2) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %28 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %28 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %4 = stablehlo.dot_general %arg6, %arg4, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x12xf32>, tensor<12x6xf32>) -> tensor<2x6xf32>
      %5 = stablehlo.broadcast_in_dim %arg5, dims = [1] : (tensor<6xf32>) -> tensor<1x6xf32>
      %6 = stablehlo.broadcast_in_dim %5, dims = [0, 1] : (tensor<1x6xf32>) -> tensor<2x6xf32>
      %7 = stablehlo.add %4, %6 : tensor<2x6xf32>
      %8 = stablehlo.subtract %7, %arg7 : tensor<2x6xf32>
      %9 = stablehlo.multiply %8, %8 : tensor<2x6xf32>
      %cst_1 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %10 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %11 = stablehlo.multiply %10, %8 : tensor<2x6xf32>
      %cst_2 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %12 = stablehlo.reduce(%9 init: %cst_2) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x6xf32>, tensor<f32>) -> tensor<f32>
      %cst_3 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %13 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %14 = stablehlo.multiply %13, %11 : tensor<2x6xf32>
      %cst_4 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %15 = stablehlo.reduce(%14 init: %cst_4) applies stablehlo.add across dimensions = [0] : (tensor<2x6xf32>, tensor<f32>) -> tensor<6xf32>
      %16 = stablehlo.reshape %15 : (tensor<6xf32>) -> tensor<1x6xf32>
      %cst_5 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %17 = stablehlo.reduce(%16 init: %cst_5) applies stablehlo.add across dimensions = [0] : (tensor<1x6xf32>, tensor<f32>) -> tensor<6xf32>
      %18 = stablehlo.dot_general %14, %arg6, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6xf32>, tensor<2x12xf32>) -> tensor<6x12xf32>
      %19 = stablehlo.transpose %18, dims = [1, 0] : (tensor<6x12xf32>) -> tensor<12x6xf32>
      %20 = "stablehlo.all_reduce"(%12) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %28 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %28 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %21 = stablehlo.divide %20, %3 : tensor<f32>
      %22 = "stablehlo.all_reduce"(%19) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %28 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %28 : tensor<f32>
      }) : (tensor<12x6xf32>) -> tensor<12x6xf32>
      %23 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %24 = stablehlo.divide %22, %23 : tensor<12x6xf32>
      %25 = "stablehlo.all_reduce"(%17) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %28 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %28 : tensor<f32>
      }) : (tensor<6xf32>) -> tensor<6xf32>
      %26 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<f32>) -> tensor<6xf32>
      %27 = stablehlo.divide %25, %26 : tensor<6xf32>
      sdy.return %21, %24, %27 : tensor<f32>, tensor<12x6xf32>, tensor<6xf32>
    } : (tensor<12x6xf32>, tensor<6xf32>, tensor<16x12xf32>, tensor<16x6xf32>) -> (tensor<f32>, tensor<12x6xf32>, tensor<6xf32>)
    return %0#0, %0#1, %0#2 : tensor<f32>, tensor<12x6xf32>, tensor<6xf32>
  }
}
