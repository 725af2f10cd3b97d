import java.io.File;
import java.io.FileOutputStream;
import java.io.OutputStream;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.server.MiniYARNCluster;

/**
 * HDFS with one DataNode, and YARN with two NodeManagers, until standard input ends.
 *
 * Arguments: a folder for the data, the file to write the clients' configuration to, and settings
 * as NAME=VALUE. (Hadoop's own MiniHadoopClusterManager wants classes of MapReduce as well, which
 * hadoop-client-minicluster does not have.)
 */
public class MiniHadoopMain {
  public static void main(String[] arguments) throws Exception {
    File folder = new File(arguments[0]);
    File written = new File(arguments[1]);
    Configuration settings = new YarnConfiguration();
    for (int i = 2; i < arguments.length; i++) {
      String[] parts = arguments[i].split("=", 2);
      settings.set(parts[0], parts[1]);
    }
    MiniDFSCluster dfs =
        new MiniDFSCluster.Builder(settings, new File(folder, "dfs")).numDataNodes(1).build();
    dfs.waitActive();
    settings.set("fs.defaultFS", dfs.getURI().toString());
    MiniYARNCluster yarn = new MiniYARNCluster("yarn", 2, 1, 1);
    yarn.init(settings);
    yarn.start();
    yarn.waitForNodeManagersToConnect(120000);
    File partial = new File(written.getPath() + ".part");
    try (OutputStream out = new FileOutputStream(partial)) {
      yarn.getConfig().writeXml(out);
    }
    partial.renameTo(written);
    while (System.in.read() != -1) {
      // nothing is ever said; the end of the input is the end of the cluster
    }
    yarn.stop(); // which ends containers that still run
    dfs.shutdown();
    System.exit(0);
  }
}
