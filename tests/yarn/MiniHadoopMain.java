import java.io.BufferedReader;
import java.io.File;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.EnumSet;
import java.util.List;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.yarn.api.records.ApplicationAttemptReport;
import org.apache.hadoop.yarn.api.records.ApplicationReport;
import org.apache.hadoop.yarn.api.records.ContainerReport;
import org.apache.hadoop.yarn.api.records.SignalContainerCommand;
import org.apache.hadoop.yarn.api.records.YarnApplicationState;
import org.apache.hadoop.yarn.client.api.YarnClient;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.server.MiniYARNCluster;
import org.apache.hadoop.yarn.server.api.ApplicationInitializationContext;
import org.apache.hadoop.yarn.server.api.ApplicationTerminationContext;
import org.apache.hadoop.yarn.server.api.AuxiliaryService;
import org.apache.hadoop.yarn.server.nodemanager.containermanager.container.Container;
import org.apache.hadoop.yarn.server.nodemanager.containermanager.container.ContainerState;
import org.apache.spark.network.TransportContext;
import org.apache.spark.network.shuffle.ExternalBlockHandler;
import org.apache.spark.network.util.MapConfigProvider;
import org.apache.spark.network.util.TransportConf;

/**
 * HDFS with two DataNodes, and YARN with two NodeManagers, until standard input ends.
 *
 * Arguments: a folder for the data, the file to write the clients' configuration to, and settings
 * as NAME=VALUE. Each line of standard input is a command (see {@link #answer}); its answer is one
 * line of standard output. (Hadoop's own MiniHadoopClusterManager wants classes of MapReduce as
 * well, which hadoop-client-minicluster does not have.)
 */
public class MiniHadoopMain {
  private final MiniDFSCluster dfs;
  private final MiniYARNCluster yarn;
  private final YarnClient client = YarnClient.createYarnClient();

  private MiniHadoopMain(File folder, Configuration settings) throws Exception {
    dfs = new MiniDFSCluster.Builder(settings, new File(folder, "dfs")).numDataNodes(2).build();
    dfs.waitActive();
    for (String shared : new String[] {"/", "/user"}) { // every user makes folders of their own
      dfs.getFileSystem().mkdirs(new Path(shared));
      dfs.getFileSystem().setPermission(new Path(shared), new FsPermission((short) 0777));
    }
    settings.set("fs.defaultFS", dfs.getURI().toString());
    settings.set("spark.shuffle.service.port", "" + SparkShuffle.serve());
    yarn = new MiniYARNCluster("yarn", 2, 1, 1);
    yarn.init(settings);
    yarn.start();
    yarn.waitForNodeManagersToConnect(120000);
    client.init(yarn.getConfig());
    client.start();
  }

  /**
   * Spark's external shuffle service, one for the NodeManagers of this process, which are one host.
   * (Spark's own class for YARN is not among PySpark's jars; the handler of blocks is.)
   */
  public static class SparkShuffle extends AuxiliaryService {
    private static ExternalBlockHandler handler;

    public SparkShuffle() {
      super("spark_shuffle");
    }

    /** Begins to serve; the port. */
    static int serve() throws Exception {
      TransportConf conf = new TransportConf("shuffle", MapConfigProvider.EMPTY);
      handler = new ExternalBlockHandler(conf, null);
      return new TransportContext(conf, handler)
          .createServer("127.0.0.1", 0, Collections.emptyList())
          .getPort();
    }

    @Override
    public void initializeApplication(ApplicationInitializationContext application) {}

    @Override
    public void stopApplication(ApplicationTerminationContext application) {
      handler.applicationRemoved(application.getApplicationId().toString(), true);
    }

    @Override
    public ByteBuffer getMetaData() {
      return ByteBuffer.allocate(0);
    }
  }

  public static void main(String[] arguments) {
    PrintStream answers = System.out;
    System.setOut(System.err); // Hadoop's own lines
    try {
      Configuration settings = new YarnConfiguration();
      for (int i = 2; i < arguments.length; i++) {
        String[] parts = arguments[i].split("=", 2);
        settings.set(parts[0], parts[1]);
      }
      MiniHadoopMain cluster = new MiniHadoopMain(new File(arguments[0]), settings);
      cluster.write(new File(arguments[1]));
      BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
      for (String line = commands.readLine(); line != null; line = commands.readLine()) {
        answers.println(cluster.answerOrFailure(line.split(" ")));
        answers.flush();
      }
      cluster.endContainers();
      Runtime.getRuntime().halt(0); // an orderly end takes half a minute
    } catch (Throwable failure) { // threads of what has started would keep the process
      failure.printStackTrace();
      System.exit(1);
    }
  }

  private void endContainers() throws Exception {
    EnumSet<YarnApplicationState> running =
        EnumSet.of(YarnApplicationState.ACCEPTED, YarnApplicationState.RUNNING);
    for (ApplicationReport one : client.getApplications(running)) {
      client.killApplication(one.getApplicationId());
    }
    long deadline = System.currentTimeMillis() + 20000;
    while (System.currentTimeMillis() < deadline && hasContainers()) {
      Thread.sleep(100);
    }
  }

  private boolean hasContainers() {
    for (int i = 0; i < 2; i++) {
      for (Container one : yarn.getNodeManager(i).getNMContext().getContainers().values()) {
        if (one.getContainerState() != ContainerState.DONE) {
          return true;
        }
      }
    }
    return false;
  }

  private void write(File written) throws Exception {
    Configuration clients = new Configuration(yarn.getConfig());
    // the mini cluster's own class, which clients lack
    clients.set("net.topology.node.switch.mapping.impl", "org.apache.hadoop.net.ScriptBasedMapping");
    File partial = new File(written.getPath() + ".part");
    try (OutputStream out = new FileOutputStream(partial)) {
      clients.writeXml(out);
    }
    partial.renameTo(written);
  }

  private String answerOrFailure(String[] command) {
    try {
      return "ok " + answer(command);
    } catch (Exception failure) {
      return "failed " + String.valueOf(failure).replace('\n', ' ');
    }
  }

  /**
   * applications: ID:STATE:QUEUE of each. attempts APPLICATION: how many there were. containers
   * APPLICATION: ID@NODE of those that run, the first of the attempt first, which has the
   * application master. kill APPLICATION NUMBER: ends a container as "yarn container -signal" does.
   * preempted APPLICATION: megabytes times seconds of containers that were taken for another queue.
   * end APPLICATION: as "yarn application -kill". stop-node NODE: a NodeManager is lost. folder
   * PATH MODE, put LOCAL PATH, list
   * PATH, quota FOLDER BYTES NAMES (either may be "any"): of HDFS.
   */
  private String answer(String[] command) throws Exception {
    List<String> found = new ArrayList<>();
    switch (command[0]) {
      case "applications":
        for (ApplicationReport one : client.getApplications()) {
          found.add(one.getApplicationId() + ":" + one.getYarnApplicationState() + ":" + one.getQueue());
        }
        break;
      case "attempts":
        found.add("" + client.getApplicationAttempts(application(command[1]).getApplicationId()).size());
        break;
      case "containers":
        for (ContainerReport one : containers(command[1])) {
          found.add(one.getContainerId() + "@" + one.getAssignedNode());
        }
        break;
      case "kill":
        ContainerReport killed = containers(command[1]).get(Integer.parseInt(command[2]));
        client.signalToContainer(killed.getContainerId(), SignalContainerCommand.FORCEFUL_SHUTDOWN);
        found.add(killed.getContainerId().toString());
        break;
      case "preempted":
        found.add(
            ""
                + application(command[1])
                    .getApplicationResourceUsageReport()
                    .getPreemptedMemorySeconds());
        break;
      case "end":
        client.killApplication(application(command[1]).getApplicationId());
        break;
      case "stop-node":
        for (int i = 0; i < 2; i++) {
          if (yarn.getNodeManager(i).getNMContext().getNodeId().toString().equals(command[1])) {
            yarn.getNodeManager(i).stop();
          }
        }
        break;
      case "folder":
        dfs.getFileSystem().mkdirs(new Path(command[1]));
        dfs.getFileSystem().setPermission(new Path(command[1]), new FsPermission(command[2]));
        break;
      case "put":
        dfs.getFileSystem().copyFromLocalFile(new Path(command[1]), new Path(command[2]));
        break;
      case "list":
        for (FileStatus one : dfs.getFileSystem().listStatus(new Path(command[1]))) {
          found.add(one.getPath().getName());
        }
        break;
      case "quota":
        dfs.getFileSystem().setQuota(new Path(command[1]), quota(command[3]), quota(command[2]));
        break;
      default:
        throw new IllegalArgumentException("no command " + command[0]);
    }
    return String.join(" ", found);
  }

  private static long quota(String text) {
    return text.equals("any") ? Long.MAX_VALUE - 1 : Long.parseLong(text);
  }

  private ApplicationReport application(String id) throws Exception {
    for (ApplicationReport one : client.getApplications()) {
      if (one.getApplicationId().toString().equals(id)) {
        return one;
      }
    }
    throw new IllegalArgumentException("no application " + id);
  }

  private List<ContainerReport> containers(String id) throws Exception {
    ApplicationAttemptReport attempt =
        client.getApplicationAttemptReport(application(id).getCurrentApplicationAttemptId());
    List<ContainerReport> found =
        new ArrayList<>(client.getContainers(attempt.getApplicationAttemptId()));
    found.sort((a, b) -> a.getContainerId().compareTo(b.getContainerId()));
    return found;
  }
}
