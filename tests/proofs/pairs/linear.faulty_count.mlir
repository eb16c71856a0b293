module @jit__lambda attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
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
      %cst_1 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %10 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %11 = stablehlo.multiply %10, %8 : tensor<2x6xf32>
      %cst_2 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %12 = stablehlo.reduce(%11 init: %cst_2) applies stablehlo.add across dimensions = [0] : (tensor<2x6xf32>, tensor<f32>) -> tensor<6xf32>
      %13 = stablehlo.reshape %12 : (tensor<6xf32>) -> tensor<1x6xf32>
      %cst_3 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %14 = stablehlo.reduce(%13 init: %cst_3) applies stablehlo.add across dimensions = [0] : (tensor<1x6xf32>, tensor<f32>) -> tensor<6xf32>
      %15 = stablehlo.dot_general %11, %arg6, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6xf32>, tensor<2x12xf32>) -> tensor<6x12xf32>
      %16 = stablehlo.transpose %15, dims = [1, 0] : (tensor<6x12xf32>) -> tensor<12x6xf32>
      %17 = "stablehlo.all_reduce"(%9) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %25 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %25 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %cst_4 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %18 = stablehlo.divide %17, %cst_4 : tensor<f32>
      %19 = "stablehlo.all_reduce"(%16) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %25 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %25 : tensor<f32>
      }) : (tensor<12x6xf32>) -> tensor<12x6xf32>
      %cst_5 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %20 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %21 = stablehlo.divide %19, %20 : tensor<12x6xf32>
      %22 = "stablehlo.all_reduce"(%14) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %25 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %25 : tensor<f32>
      }) : (tensor<6xf32>) -> tensor<6xf32>
      %cst_6 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %23 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<6xf32>
      %24 = stablehlo.divide %22, %23 : tensor<6xf32>
      sdy.return %18, %21, %24 : tensor<f32>, tensor<12x6xf32>, tensor<6xf32>
    } : (tensor<12x6xf32>, tensor<6xf32>, tensor<16x12xf32>, tensor<16x6xf32>) -> (tensor<f32>, tensor<12x6xf32>, tensor<6xf32>)
    return %0#0, %0#1, %0#2 : tensor<f32>, tensor<12x6xf32>, tensor<6xf32>
  }
}
