module @jit_linear_psum attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<12x6xf32>, %arg1: tensor<6xf32>, %arg2: tensor<16x12xf32>, %arg3: tensor<16x6xf32>) -> (tensor<f32> {jax.result_info = "result[0]"}, tensor<12x6xf32> {jax.result_info = "result[1]"}, tensor<6xf32> {jax.result_info = "result[2]"}) {
    %0:3 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}]>, <@mesh, [{"data", "model"}, {}]>, <@mesh, [{"data", "model"}, {}]>] out_shardings=[<@mesh, []>, <@mesh, [{}, {}]>, <@mesh, [{}]>] manual_axes={"data", "model"} (%arg4: tensor<12x6xf32>, %arg5: tensor<6xf32>, %arg6: tensor<2x12xf32>, %arg7: tensor<2x6xf32>) {
      %1 = stablehlo.dot_general %arg6, %arg4, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x12xf32>, tensor<12x6xf32>) -> tensor<2x6xf32>
      %2 = stablehlo.broadcast_in_dim %arg5, dims = [1] : (tensor<6xf32>) -> tensor<1x6xf32>
      %3 = stablehlo.broadcast_in_dim %2, dims = [0, 1] : (tensor<1x6xf32>) -> tensor<2x6xf32>
      %4 = stablehlo.add %1, %3 : tensor<2x6xf32>
      %5 = stablehlo.subtract %4, %arg7 : tensor<2x6xf32>
      %6 = stablehlo.multiply %5, %5 : tensor<2x6xf32>
      %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %7 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %8 = stablehlo.multiply %7, %5 : tensor<2x6xf32>
      %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %9 = stablehlo.reduce(%6 init: %cst_0) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x6xf32>, tensor<f32>) -> tensor<f32>
      %cst_1 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %10 = stablehlo.divide %9, %cst_1 : tensor<f32>
      %cst_2 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %cst_3 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %11 = stablehlo.divide %cst_2, %cst_3 : tensor<f32>
      %12 = stablehlo.broadcast_in_dim %11, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %13 = stablehlo.multiply %12, %8 : tensor<2x6xf32>
      %cst_4 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %14 = stablehlo.reduce(%13 init: %cst_4) applies stablehlo.add across dimensions = [0] : (tensor<2x6xf32>, tensor<f32>) -> tensor<6xf32>
      %15 = stablehlo.reshape %14 : (tensor<6xf32>) -> tensor<1x6xf32>
      %cst_5 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %16 = stablehlo.reduce(%15 init: %cst_5) applies stablehlo.add across dimensions = [0] : (tensor<1x6xf32>, tensor<f32>) -> tensor<6xf32>
      %17 = stablehlo.dot_general %13, %arg6, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6xf32>, tensor<2x12xf32>) -> tensor<6x12xf32>
      %18 = stablehlo.transpose %17, dims = [1, 0] : (tensor<6x12xf32>) -> tensor<12x6xf32>
      %cst_6 = stablehlo.constant dense<8.000000e+00> : tensor<f32>
      %19 = stablehlo.divide %10, %cst_6 : tensor<f32>
      %20 = "stablehlo.all_reduce"(%19) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %27 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %27 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %cst_7 = stablehlo.constant dense<8.000000e+00> : tensor<f32>
      %21 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %22 = stablehlo.divide %18, %21 : tensor<12x6xf32>
      %23 = "stablehlo.all_reduce"(%22) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %27 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %27 : tensor<f32>
      }) : (tensor<12x6xf32>) -> tensor<12x6xf32>
      %cst_8 = stablehlo.constant dense<8.000000e+00> : tensor<f32>
      %24 = stablehlo.broadcast_in_dim %cst_8, dims = [] : (tensor<f32>) -> tensor<6xf32>
      %25 = stablehlo.divide %16, %24 : tensor<6xf32>
      %26 = "stablehlo.all_reduce"(%25) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %27 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %27 : tensor<f32>
      }) : (tensor<6xf32>) -> tensor<6xf32>
      sdy.return %20, %23, %26 : tensor<f32>, tensor<12x6xf32>, tensor<6xf32>
    } : (tensor<12x6xf32>, tensor<6xf32>, tensor<16x12xf32>, tensor<16x6xf32>) -> (tensor<f32>, tensor<12x6xf32>, tensor<6xf32>)
    return %0#0, %0#1, %0#2 : tensor<f32>, tensor<12x6xf32>, tensor<6xf32>
  }
}
